"""Converts the IR to its C++ form, which can be verified and run."""

from __future__ import annotations

from typing import Any

from popsim_torch import _native
from popsim_torch.dtypes import dtype_name
from popsim_torch.environment import flag
from popsim_torch.errors import InternalError
from popsim_torch.ir import Graph, TensorArgument, TensorListArgument


def _argument(value: Any) -> Any:
    if isinstance(value, TensorArgument):
        return _native.TensorArgument(value.input)
    if isinstance(value, TensorListArgument):
        return _native.TensorListArgument(list(value.inputs))
    return value


def _attribute(key: str, value: Any) -> Any:
    if key == "arguments":
        return _native.Arguments([_argument(item) for item in value])
    if isinstance(value, list) and any(isinstance(item, bool) for item in value):
        raise TypeError(f"{key} is a list of booleans, which C++ would take for numbers")
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    """Return a name or title as valid UTF-8, without lone surrogates."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def to_native(graph: Graph) -> _native.Graph:
    """Return the C++ form of a graph, tensor ids unchanged.

    Raises:
        InternalError: A number is too large for C++, or an attribute has a type that C++ does not
            support.
    """
    native = _native.Graph()
    for tensor in graph.tensors:
        try:
            native.add_tensor(
                _text(tensor.name),
                getattr(_native.TensorKind, tensor.kind.name),
                dtype_name(tensor.dtype),
                list(tensor.shape),
                list(tensor.strides),
                tensor.base,
                tensor.offset,
            )
        except TypeError as error:
            raise InternalError(
                f"build: C++ has no tensor '{tensor.name}' of shape {tensor.shape}, strides "
                f"{tensor.strides}, base {tensor.base}, offset {tensor.offset}"
            ) from error
    guarded = {"guarded": True} if flag("POPSIM_CHECK_CUSTOM_OPS") else {}
    for op in graph.ops:
        attributes = op.attributes | (guarded if op.kind == "custom" else {})
        try:
            native.add_op(
                op.kind,
                _text(op.name),
                op.inputs,
                op.outputs,
                {key: _attribute(key, value) for key, value in attributes.items()},
                getattr(_native.Phase, op.phase.name),
                op.stage,
                op.origin.source,
                list(map(to_native, op.bodies)),
            )
        except TypeError as error:
            raise InternalError(
                f"build: C++ has no {op.kind} '{op.name}' with such values: {op.attributes}, "
                f"inputs {op.inputs}, outputs {op.outputs}, stage {op.stage}"
            ) from error
    return native
