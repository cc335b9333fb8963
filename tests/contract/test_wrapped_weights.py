"""A weight that wraps other tensors has no memory of its own, so no kernel may be given its
address: its class is asked, whatever the input is."""

from __future__ import annotations

import pytest
import torch
from torch.utils._pytree import tree_map_only

from tests.contract.norms import KINDS, close, operator, seeded


class Wrapped(torch.Tensor):
    """As DTensor and quantised weights are made: `data_ptr()` is 0."""

    seen: list = []

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), dtype=held.dtype, device=held.device
        )

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        return func(*tree_map_only(cls, lambda t: t.held, args), **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_weights_class_sees_the_operators(kind: str) -> None:
    x, w, dy = seeded(3, 8), seeded(8, seed=1), seeded(3, 8, seed=2)
    results = []
    for weight in (w, Wrapped(w)):
        Wrapped.seen = []
        leaf = x.clone().requires_grad_()
        y = operator(kind, leaf, weight)
        y.backward(dy)
        results.append((y.detach(), leaf.grad))
    close(results[1], results[0])
    operators = torch.ops.fastnorm
    assert operators.norm_forward.default in Wrapped.seen
    assert operators.norm_backward.default in Wrapped.seen
