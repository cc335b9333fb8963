"""The grid, the bytes it counts, and what the command line accepts."""

import pytest
import torch

from benchmarks.inputs import make_inputs
from benchmarks.shapes import (
    FP32_GRID,
    HALF_GRID,
    HOST_SHAPE,
    Case,
    build_cases,
    parse_names,
    parse_shapes,
)


def test_default_grid_measures_every_shape_of_each_dtype_once():
    cases = build_cases(["fwd", "bwd"], ["layer", "rms"], ["bf16", "fp32"])
    assert len(set(cases)) == len(cases) == 4 * (len(HALF_GRID) + len(FP32_GRID))
    assert Case("bwd", "rms", "bf16", 1048576, 128) in cases
    assert Case("fwd", "layer", "fp32", 2048, 32768) in cases


def test_host_time_is_one_case_a_norm_at_its_own_shape():
    cases = build_cases(["host"], ["layer", "rms"], ["bf16", "fp32"])
    assert [(c.norm, c.dtype, (c.rows, c.hidden)) for c in cases] == [
        ("layer", "bf16", HOST_SHAPE),
        ("rms", "bf16", HOST_SHAPE),
    ]


def test_ops_of_one_shape_are_neighbours_so_tensors_are_shared():
    cases = build_cases(["fwd", "bwd"], ["rms"], ["bf16"], shapes=[(4, 8), (2, 16)])
    assert [c.hidden for c in cases] == [8, 8, 16, 16]


@pytest.mark.parametrize(
    ("op", "dtype", "expected"),
    [("fwd", "bf16", 2 * 6 * 2), ("bwd", "bf16", 3 * 6 * 2), ("bwd", "fp32", 3 * 6 * 4)],
)
def test_floor_counts_each_tensor_read_or_written_once(op, dtype, expected):
    assert Case(op, "layer", dtype, 2, 3).floor_bytes == expected


def test_host_time_has_no_floor():
    assert Case("host", "layer", "bf16", *HOST_SHAPE).floor_bytes is None


def test_shapes_are_read_in_order():
    assert parse_shapes("16384x4096, 8X5") == ((16384, 4096), (8, 5))


@pytest.mark.parametrize("text", ["", "4096", "4x", "4x-1", "0x8", "4x8x2", "axb", "4x8,"])
def test_a_shape_that_is_none_is_named_in_the_error(text):
    with pytest.raises(ValueError, match="ROWSxHIDDEN"):
        parse_shapes(text)


def test_an_unknown_name_is_refused_with_the_choice():
    with pytest.raises(ValueError, match="'group'; choose among layer, rms"):
        parse_names("rms,group", ("layer", "rms"), "norm")


def test_inputs_are_random_repeatable_and_of_the_case():
    case = Case("bwd", "layer", "bf16", 6, 32)
    one, two = make_inputs(case, "cpu"), make_inputs(case, "cpu")
    assert one.x.shape == one.dy.shape == (6, 32)
    assert one.weight.unique().numel() > 16 and one.bias is not None
    assert torch.equal(one.x, two.x) and not torch.equal(one.x, one.dy)
    assert make_inputs(Case("bwd", "rms", "bf16", 6, 32), "cpu").bias is None
