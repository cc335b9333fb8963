"""What is right, in fp64, and how far a result may be from it: the one tolerance of the tests.

Nothing here calls fastnorm's mathematics; kinds are taken as data from `fastnorm.semantics`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fastnorm.semantics import Semantics

#: Rounding floor in units of eps. 1,500 drawn norms on kernels (interpreter, seed 1) need 1.62
#: beside twice torch's error.
K = 2.0
FP32_EPS = torch.finfo(torch.float32).eps
HALF = (torch.float16, torch.bfloat16)
NAMES = ("y", "dx", "dw", "db")


@dataclass(frozen=True)
class Inputs:
    """One norm and what goes into its two passes; any strides, any floating dtypes."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    dy: Tensor
    shape: tuple[int, ...]
    eps: float
    kind: Semantics

    @property
    def rows(self) -> int:
        return self.dy.numel() // max(1, self.hidden)

    @property
    def hidden(self) -> int:
        hidden = 1
        for size in self.shape:
            hidden *= size
        return hidden

    def parameters(self) -> tuple[Tensor | None, Tensor | None]:
        return self.weight, self.bias


#: y, dx, dw, db; None where there is none.
Results = tuple[Tensor | None, ...]
NormFunction = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]


def run(inputs: Inputs, function: NormFunction) -> Results:
    """y and all gradients of a function of (x, weight, bias), for copies of the inputs."""
    leaves = [
        None if t is None else t.detach().requires_grad_()
        for t in (inputs.x, inputs.weight, inputs.bias)
    ]
    y = function(*leaves)
    wanted = [leaf for leaf in leaves if leaf is not None]
    grads = iter(torch.autograd.grad(y, wanted, inputs.dy.to(y.dtype)))
    return (y.detach(), *(None if leaf is None else next(grads) for leaf in leaves))


def exact(inputs: Inputs) -> Results:
    """The results in fp64 from the inputs as they are rounded."""
    wide = Inputs(
        inputs.x.double(),
        None if inputs.weight is None else _factor(inputs.weight, inputs.kind).double(),
        None if inputs.bias is None else inputs.bias.double(),
        inputs.dy.double(),
        inputs.shape,
        inputs.eps,
        inputs.kind,
    )
    return run(wide, lambda x, w, b: _affine(_normalized(x, wide), w, b))


def theirs(inputs: Inputs) -> Results:
    """What torch (or the layer that the kind is named after) gives in these dtypes."""
    return run(inputs, lambda x, w, b: _theirs(x, w, b, inputs))


def check(ours: Results, inputs: Inputs) -> None:
    """Assert that results are as accurate as torch's.

    For each row of y and dx, and for each element of dw and db:
    `max|ours - o| <= 2·max|theirs - o| + K·(eps(output dtype)·max|o| + eps(fp32)·scale)`,
    where o is `exact`, max|o| is no less than the smallest normal number, and scale is the size of
    what fp32 arithmetic rounds on the way (`_scales`), times sqrt(M) for sums over M rows. What is
    not finite in o must not be finite in ours; inf is right where o is beyond the output dtype;
    where o is finite and torch overflows, anything goes.

    Args:
        ours: y, dx, dw, db of the code under test.
        inputs: what they were computed from.
    """
    reference, peer, scales = exact(inputs), theirs(inputs), _scales(inputs)
    for name, our, right, their, scale in zip(NAMES, ours, reference, peer, scales, strict=True):
        if right is None or our is None:
            assert our is right is None, f"{name}: {our} in place of {right}"
            continue
        assert our.shape == right.shape, f"{name}: shape {our.shape}, expected {right.shape}"
        assert our.dtype == their.dtype, f"{name}: {our.dtype}, expected {their.dtype}"
        excess, where = worst_excess(our, right, their, scale, inputs)
        assert excess <= 1, (
            f"{name} at group {where}: error is {excess:.3g} of what is allowed"
            f" ({our.dtype}, x {tuple(inputs.x.shape)} {inputs.x.dtype})"
        )


def worst_excess(
    our: Tensor, right: Tensor, their: Tensor, scale: Tensor, inputs: Inputs
) -> tuple[float, int]:
    """The largest ratio of error to allowance over groups (rows, or elements of a parameter's
    gradient), and the group it is found in."""
    if not our.numel():
        return 0.0, -1
    # scale has one entry per group: rows of y and dx, elements of dw and db.
    grouped = [t.detach().double().reshape(scale.numel(), -1) for t in (our, right, their)]
    our64, right64, their64 = grouped
    hidden_nan = ~right64.isfinite() & our64.isfinite() & (our64 != their64)
    info = torch.finfo(our.dtype)
    error, their_error = (_errors(t, right64, info.max).amax(1) for t in (our64, their64))
    size = torch.where(right64.isfinite(), right64.abs(), 0.0).amax(1)
    floor = info.eps * size.clamp_min(info.smallest_normal) + FP32_EPS * scale.reshape(-1)
    allowed = 2 * their_error + K * floor
    # 0/0 is a result that is exact where it must be.
    ratio = torch.where(error == 0, 0.0, error / allowed)
    ratio = torch.where(their_error.isfinite(), ratio, 0.0)
    ratio = torch.where(hidden_nan.any(1), torch.inf, ratio)
    ratio = torch.where(ratio.isnan(), torch.inf, ratio)
    return float(ratio.max()), int(ratio.argmax())


def _errors(found: Tensor, right: Tensor, largest: float) -> Tensor:
    """|found - right|; 0 where right is not finite, and where it is rightly rounded to inf."""
    overflowed = (right.abs() > largest) & (found == right.sign() * torch.inf)
    return torch.where(right.isfinite() & ~overflowed, (found - right).abs(), 0.0)


def _scales(inputs: Inputs) -> tuple[Tensor, ...]:
    """Sizes of the largest values that fp32 rounds: per row for y and dx, per element for dw, db.

    A mean is rounded at the size of x, so x_hat carries an error of eps·|x|·rstd however small the
    variance; the rest follows from dx = (wdy - x_hat·c1 - c2)·rstd and dw = sum(dy·x_hat).
    """
    rows, hidden = inputs.rows, inputs.hidden
    x = inputs.x.double().reshape(rows, hidden)
    dy = inputs.dy.double().reshape(rows, hidden)
    deviation = x - x.mean(1, keepdim=True) if inputs.kind.centered else x
    rstd = torch.rsqrt(deviation.square().mean(1, keepdim=True) + inputs.eps)
    weight = torch.ones((), dtype=torch.float64, device=x.device)
    if inputs.weight is not None:
        factor = _factor(inputs.weight, inputs.kind).double()
        # Offsets are added in fp32, at the size of the weight before it.
        weight = (factor.abs() + 1).expand(inputs.shape).reshape(1, hidden)
    x_hat = (x.abs() * rstd).amax(1, keepdim=True).clamp_min(1) if x.numel() else rstd
    # A row that is not finite has no error to allow for, and must not lift the sums' allowance.
    x_hat = torch.where(x_hat.isfinite(), x_hat, 1.0)
    rstd = torch.where(rstd.isfinite(), rstd, 0.0)
    y = (x_hat * weight.abs()).expand(rows, hidden)
    if inputs.bias is not None:
        y = y + inputs.bias.double().reshape(1, hidden).abs()
    wdy = (weight * dy).abs()
    sums = rows**0.5 * ((dy * x_hat).square().sum(0).sqrt()).reshape(inputs.shape)
    dx = (wdy * x_hat * rstd).expand(rows, hidden)
    return (
        y.amax(1) if y.numel() else y.sum(1),
        dx.amax(1) if dx.numel() else dx.sum(1),
        sums,
        rows**0.5 * dy.square().sum(0).sqrt().reshape(inputs.shape),
    )


def _factor(weight: Tensor, kind: Semantics) -> Tensor:
    """What x_hat is multiplied by, in the precision in which the kind forms it."""
    if kind.weight_offset == "none":
        return weight
    if kind.weight_offset == "fp32":
        return weight.double() + 1
    return weight + 1


def _normalized(x: Tensor, inputs: Inputs) -> Tensor:
    axes = tuple(range(-len(inputs.shape), 0))
    if inputs.kind.centered:
        x = x - x.mean(axes, keepdim=True)
    return x * torch.rsqrt(x.square().mean(axes, keepdim=True) + inputs.eps)


def _affine(x_hat: Tensor, factor: Tensor | None, bias: Tensor | None) -> Tensor:
    y = x_hat if factor is None else x_hat * factor
    return y if bias is None else y + bias


def _theirs(x: Tensor, weight: Tensor | None, bias: Tensor | None, inputs: Inputs) -> Tensor:
    kind, shape, eps = inputs.kind, inputs.shape, inputs.eps
    wide = torch.promote_types(x.dtype, torch.float32)
    if kind.name == "rms":
        return F.rms_norm(x, shape, weight, eps)
    if kind.name in ("layer", "layer_offset") and _torch_accepts(x, weight, bias):
        factor = weight + 1 if kind.name == "layer_offset" and weight is not None else weight
        if factor is None and bias is not None:
            # Above 65,536 rows torch's CUDA backward has no gradient for a bias alone.
            x_hat = F.layer_norm(x.to(wide), shape, None, None, eps)
            return (x_hat + bias.to(wide)).to(x.dtype)
        return F.layer_norm(x, shape, factor, bias, eps)
    factor = None if weight is None else _factor32(weight, kind, wide)
    if kind.centered:
        b = None if bias is None else bias.to(wide)
        return F.layer_norm(x.to(wide), shape, factor, b, eps).to(x.dtype)
    if kind.rounds_normalized == "no" or weight is None:
        return F.rms_norm(x.to(wide), shape, factor, eps).to(x.dtype)
    x_hat = F.rms_norm(x.to(wide), shape, None, eps)
    if kind.rounds_normalized == "input":
        x_hat = x_hat.to(x.dtype)
    elif weight.dtype in HALF:
        x_hat = x_hat.to(weight.dtype)
    return weight * x_hat


def _torch_accepts(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether `F.layer_norm` takes this mix of dtypes."""
    dtypes = {t.dtype for t in (weight, bias) if t is not None}
    on_cpu = x.device.type == "cpu" and x.dtype in HALF and dtypes == {torch.float32}
    # Its backward fails on a bias without a weight.
    return dtypes <= {x.dtype} or (on_cpu and weight is not None)


def _factor32(weight: Tensor, kind: Semantics, wide: torch.dtype) -> Tensor:
    if kind.weight_offset == "weight_dtype":
        return (weight + 1).to(wide)
    return weight.to(wide) + (1 if kind.weight_offset == "fp32" else 0)
