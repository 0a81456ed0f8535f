"""Finds custom operators, and checks calls with their shape rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from popsim_torch import _native
from popsim_torch.custom_ops.attributes import Value, packed
from popsim_torch.dtypes import dtype_name
from popsim_torch.errors import Error, closest_names

__all__ = [
    "CustomCall",
    "Type",
    "check_examples",
    "has_gradient",
    "is_registered",
    "refuse_unknown",
    "result_types",
]

Type = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and shape of a tensor on the device."""


@dataclass(frozen=True)
class CustomCall:
    """A call of a custom operator.

    Attributes:
        domain: The domain of the operator.
        name: The name of the operator.
        version: The version of the operator.
        attributes: The checked attributes.
        results: The types of the results.
    """

    domain: str
    name: str
    version: int
    attributes: Mapping[str, Value]
    results: tuple[Type, ...]

    @property
    def shown(self) -> str:
        """The name of the operator in messages."""
        return f"{self.domain}::{self.name} version {self.version}"


def is_registered(call: CustomCall) -> bool:
    """Whether a library or Python has registered the operator."""
    _look_for_libraries()
    return _native.find_custom_op(call.domain, call.name, call.version) is not None


def has_gradient(call: CustomCall) -> bool:
    """Whether a registered operator has a gradient."""
    entry = _native.find_custom_op(call.domain, call.name, call.version)
    return entry is not None and entry.has_gradient


def result_types(call: CustomCall, inputs: Sequence[Type]) -> list[Type] | None:
    """Return the types of a registered operator's results; None if it has no shape rule.

    Args:
        call: The call.
        inputs: The types of the inputs.

    Raises:
        Error: The shape rule refuses the inputs.
    """
    graph = _native.Graph()
    for i, (dtype, shape) in enumerate(inputs):
        strides = list(torch.empty(shape, device="meta").stride())
        graph.add_tensor(
            f"{i}", _native.TensorKind.INPUT, dtype_name(dtype), list(shape), strides, -1, 0
        )
    identity = {"domain": call.domain, "name": call.name, "version": call.version}
    attributes = {**identity, **packed(call.attributes)}
    graph.add_op(
        "custom",
        call.name,
        list(range(len(inputs))),
        [],
        attributes,
        _native.Phase.FORWARD,
        0,
        "",
    )
    with _native.translated_errors():
        types = _native.custom_op_types(graph, 0)
    if types is None:
        return None
    return [(getattr(torch, dtype), tuple(shape)) for dtype, shape in types]


def check_examples(call: CustomCall, types: Sequence[Type]) -> None:
    """Check that an operator returns outputs like the examples.

    Raises:
        Error: The outputs differ.
    """
    if tuple(types) == call.results:
        return

    def shown(types: Sequence[Type]) -> str:
        return ", ".join(f"{dtype} {shape}" for dtype, shape in types)

    raise Error(
        f"{call.shown} gives {shown(types)} for these inputs, and example_outputs are "
        f"{shown(call.results)}. Pass examples with the shapes and dtypes of its outputs, or "
        "correct its shape rule."
    )


def refuse_unknown(call: CustomCall, others: Sequence[str]) -> Error:
    """Return the error for an operator that is not registered.

    Args:
        call: The call.
        others: The names of operators that exist besides the registered ones.
    """
    problems = _look_for_libraries()
    known = [f"{op.domain}::{op.name} version {op.version}" for op in _native.custom_ops()]
    listed = [*known, *others]
    alike = closest_names(call.shown, listed)
    message = f"custom_op: there is no operator {call.shown}."
    if alike:
        message += f" Closest: {', '.join(alike)}."
    message += f" Registered: {', '.join(known) or 'none'}."
    message += (
        " Load the library that has it (ctypes.cdll.LoadLibrary, written against "
        "popsim_custom_op.h), or register a kernel in Python with poptorch.register_custom_op."
    )
    return Error(" ".join([message, *problems]))


def _look_for_libraries() -> list[str]:
    return _native.look_for_custom_ops(sorted(torch.ops.loaded_libraries))
