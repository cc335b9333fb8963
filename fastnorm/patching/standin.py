"""A stand-in for a norm layer: its class and attributes, numbers of our own, no hooks.

Running it touches nothing of the user's: not the parameters (which may be on a GPU, on meta or
not loaded yet), not the hooks, not the random state.
"""

from __future__ import annotations

import copy
import enum
import inspect
import math
import types

import torch
from torch import Tensor, nn

from fastnorm.patching.probes import ON_CPU
from fastnorm.patching.recipe import Refusal

_MODULE_STATE = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "forward"}
_PLAIN = (
    bool,
    int,
    float,
    str,
    bytes,
    type(None),
    type,
    enum.Enum,
    torch.dtype,
    torch.device,
    types.FunctionType,
    types.BuiltinFunctionType,
)
_MOST_FEATURES = 1 << 20
"""A leaf with larger parameters is no norm layer; running it on a CPU would take too long."""


def own_attributes(module: nn.Module) -> dict[str, object]:
    """What the class itself put on the module: neither nn.Module's state nor its parameters."""
    return {name: value for name, value in vars(module).items() if name not in _MODULE_STATE}


def configuration(module: nn.Module) -> tuple[object, ...]:
    """Two modules with equal configurations compute the same function of input and parameters."""
    tensors = [*module._parameters.items(), *module._buffers.items()]
    return (
        type(module),
        tuple((name, None if t is None else full_shape(t)) for name, t in tensors),
        tuple((name, repr(value)) for name, value in sorted(own_attributes(module).items())),
    )


def full_shape(tensor: Tensor) -> tuple[int, ...]:
    """The shape a parameter has during its layer's call; DeepSpeed's ZeRO-3 empties it between."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def obstacle(module: nn.Module) -> Refusal | None:
    """What keeps a norm-like module from being tried out at all."""
    if module._modules:
        # Its inner norms are modules of their own and are looked at by themselves.
        return Refusal("it has child modules: norms among them are taken one by one")
    cls = type(module)
    if cls.__call__ is not nn.Module.__call__ or cls.__getattr__ is not nn.Module.__getattr__:
        return Refusal("its class overrides __call__ or __getattr__", unknown=True)
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    if not parameters or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return Refusal("its forward does not take one tensor", unknown=True)
    if len(parameters) > 1:
        names = ", ".join(p.name for p in parameters[1:])
        return Refusal(f"its forward takes further inputs: {names}", unknown=True)
    return _unusual_state(module)


def _unusual_state(module: nn.Module) -> Refusal | None:
    tensors = [*module._parameters.items(), *module._buffers.items()]
    for name, tensor in tensors:
        if tensor is None:
            continue
        if not tensor.is_floating_point() or torch.finfo(tensor.dtype).bits < 16:
            return Refusal(f"its {name} is of dtype {tensor.dtype}", unknown=True)
        shape = full_shape(tensor)
        if not 1 <= len(shape) <= 2 or not 0 < math.prod(shape) <= _MOST_FEATURES:
            return Refusal(f"its {name} has shape {list(shape)}", unknown=True)
    if len([t for _, t in tensors if t is not None]) > 3:
        return Refusal("it has more parameters than a norm", unknown=True)
    for name, value in own_attributes(module).items():
        if not _is_plain(value):
            kind = type(value).__name__
            return Refusal(f"its attribute {name} is a {kind}, which may hold state", unknown=True)
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(k) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return all(_is_plain(item) for item in value)
    return isinstance(value, _PLAIN)


class StandIn:
    """The stand-in and its numbers.

    Args:
        module: the layer to stand in for; only its class, attributes and shapes are read.
        generator: where the parameters' values come from.
    """

    def __init__(self, module: nn.Module, generator: torch.Generator) -> None:
        # object.__new__ rather than the constructor, whose arguments nobody knows.
        self.module: nn.Module = object.__new__(type(module))
        vars(self.module).update(vars(nn.Module()))
        vars(self.module).update(copy.deepcopy(own_attributes(module)))
        self._values: dict[str, Tensor] = {}
        for names in (module._parameters, module._buffers):
            for name, tensor in names.items():
                if tensor is not None:
                    # Far from 1 and of both signs, so that `1 + w` rounds in half precision too.
                    self._values[name] = 3 * torch.randn(
                        full_shape(tensor), generator=generator, **ON_CPU
                    )
        self._before = self._attributes()
        self._parameters = dict.fromkeys(module._parameters)
        self._buffers = dict.fromkeys(module._buffers)

    def _attributes(self) -> str:
        """Plain attributes of the module and of its classes, in a form that compares."""
        classes = type(self.module).__mro__[: -len(nn.Module.__mro__)]
        plain = [
            (cls.__qualname__, name, value)
            for cls in classes
            for name, value in vars(cls).items()
            if not name.startswith("__") and _is_plain(value)
        ]
        return repr((sorted(own_attributes(self.module).items()), plain))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters and buffers."""
        return tuple(tuple(value.shape) for value in self._values.values())

    @property
    def tensor_names(self) -> tuple[str, ...]:
        """Names of the parameters and buffers that exist."""
        return tuple(self._values)

    def use_dtype(self, dtype: torch.dtype) -> None:
        """Put fresh parameters and buffers of this dtype into the module."""
        for name in self._parameters:
            value = self._values.get(name)
            made = None if value is None else nn.Parameter(value.to(dtype, copy=True))
            self.module._parameters[name] = made
        for name in self._buffers:
            value = self._values.get(name)
            self.module._buffers[name] = None if value is None else value.to(dtype, copy=True)

    def is_unchanged(self, dtype: torch.dtype) -> bool:
        """Whether the runs so far, the last one in `dtype`, left tensors and attributes alone."""
        if self._attributes() != self._before:
            return False
        tensors = {**self.module._parameters, **self.module._buffers}
        if set(tensors) != {*self._parameters, *self._buffers} or self.module._modules:
            return False
        return all(
            (tensor is None and value is None)
            or (tensor is not None and value is not None and torch.equal(tensor, value.to(dtype)))
            for tensor, value in ((t, self._values.get(name)) for name, t in tensors.items())
        )
