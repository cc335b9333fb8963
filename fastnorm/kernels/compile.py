"""From a plan to a compiled kernel, for any target and with no GPU. Nothing is decided here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fastnorm.kernels.backward import norm_backward
from fastnorm.kernels.finalize import norm_finalize
from fastnorm.kernels.forward import norm_forward
from fastnorm.kernels.split_backward import norm_backward_split
from fastnorm.kernels.split_forward import norm_forward_split

if TYPE_CHECKING:
    from fastnorm.plan import Plan

_POINTER = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32", None: "*fp32"}
_ELEMENT = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}


def constants(plan: Plan) -> dict[str, Any]:
    """The constexprs of a plan's kernel, in its signature's order."""
    return _forward_constants(plan) if plan.problem.direction == "forward" else _backward(plan)


def _backward(plan: Plan) -> dict[str, Any]:
    p = plan.problem
    rows, columns = plan.final_tile()
    return {
        "N": p.hidden,
        "STRIDE_UNIT": p.stride_unit,
        "CENTERED": p.kind.centered,
        "HAS_WEIGHT": p.weight_dtype is not None,
        "WEIGHT_OFFSET": p.kind.weight_offset,
        "NEEDS_DX": p.needs_dx,
        "NEEDS_DW": p.needs_dw,
        "NEEDS_DB": p.needs_db,
        **_tiling(plan),
        **({} if plan.tiling.split > 1 else {"ONE_LAUNCH": plan.one_launch}),
        "FINAL_ROWS": rows,
        "FINAL_COLUMNS": columns,
    }


def _forward_constants(plan: Plan) -> dict[str, Any]:
    p = plan.problem
    rounding = {"no": None, "input": p.x_dtype, "half_weight": p.weight_dtype}
    round_to = rounding[p.kind.rounds_normalized] if p.weight_dtype is not None else None
    return {
        "N": p.hidden,
        "STRIDE_UNIT": p.stride_unit,
        "CENTERED": p.kind.centered,
        "HAS_WEIGHT": p.weight_dtype is not None,
        "HAS_BIAS": p.bias_dtype is not None,
        "WEIGHT_OFFSET": p.kind.weight_offset,
        "ROUND_TO": None if round_to is None else _ELEMENT[round_to],
        **_tiling(plan),
    }


def _tiling(plan: Plan) -> dict[str, Any]:
    t = plan.tiling
    common = {"CHUNK": t.chunk, "CHUNKS": t.chunks}
    if t.split > 1:
        keep = {"KEEP_WEIGHT": t.keep_weight}
        return {"SPLIT": t.split, **common, **keep, "STAGES": t.stages, "WARPS": t.warps}
    keep = {"KEEP_ROW": t.keep_row}
    if plan.problem.direction == "backward":
        keep["KEEP_WEIGHT"] = t.keep_weight
    return {"BLOCK_M": t.block_m, **common, **keep, "STAGES": t.stages}


def _pointer_types(plan: Plan) -> dict[str, str]:
    p = plan.problem
    x, y = _POINTER[p.x_dtype], _POINTER[p.y_dtype]
    weight, bias = _POINTER[p.weight_dtype], _POINTER[p.bias_dtype]
    common = {
        "x_ptr": x,
        "weight_ptr": weight,
        "stats_ptr": "*fp32",
        "semaphore_ptr": "*i32",
        "slots_ptr": "*i64",
    }
    if p.direction == "forward":
        return {**common, "bias_ptr": bias, "y_ptr": y, "eps": "fp32"}
    return {
        **common,
        "dy_ptr": y,
        "dx_ptr": x,
        "dw_ptr": weight,
        "db_ptr": bias,
        "dw_partial_ptr": "*fp32",
        "db_partial_ptr": "*fp32",
    }


def compile_plan(plan: Plan, capability: int) -> Any:
    """Compile a plan's kernel for a target; no GPU needed.

    Args:
        plan: what to compile.
        capability: 90 for sm_90.

    Returns:
        Triton's compiled kernel; `asm["cubin"]` and `metadata.shared` are there at once, the rest
        once it is loaded.
    """
    kernel = _KERNELS[plan.problem.direction, plan.tiling.split > 1]
    return _compile(
        kernel,
        constants(plan),
        _pointer_types(plan),
        capability,
        aligned=plan.problem.aligned,
        num_warps=plan.tiling.warps,
        maxnreg=plan.max_registers,
        launch_cooperative_grid=plan.cooperative,
    )


_KERNELS = {
    ("forward", False): norm_forward,
    ("forward", True): norm_forward_split,
    ("backward", False): norm_backward,
    ("backward", True): norm_backward_split,
}


def finalize_constants(plan: Plan) -> dict[str, Any]:
    """The constexprs of `norm_finalize` under a plan."""
    p = plan.problem
    rows, columns = plan.final_tile()
    return {
        "N": p.hidden,
        "NEEDS_DW": p.needs_dw,
        "NEEDS_DB": p.needs_db,
        "ROWS": rows,
        "COLUMNS": columns,
    }


def compile_finalize(plan: Plan, capability: int) -> Any:
    """Compile the separate final reduction of a plan that does not reduce in its own launch."""
    return _compile(
        norm_finalize,
        finalize_constants(plan),
        _pointer_types(plan),
        capability,
        aligned=True,
        num_warps=4,
    )


def _compile(
    kernel: Any,
    constexprs: dict[str, Any],
    types: dict[str, str],
    capability: int,
    aligned: bool,
    **options: Any,
) -> Any:
    names = kernel.arg_names
    types = {"P": "i32", **types}
    signature = {n: "constexpr" if n in constexprs else types.get(n, "i64") for n in names}
    pointers = [i for i, n in enumerate(names) if signature[n].startswith("*")]
    attrs = {(i,): [["tt.divisibility", 16]] for i in pointers} if aligned else {}
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(n),): v for n, v in constexprs.items()},
        attrs=attrs,
    )
    options = {k: v for k, v in options.items() if v}
    return triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": True, **options},
    )
