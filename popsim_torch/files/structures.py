"""The structures of a compiled model's arguments and outputs, in a file.

Both are written as an example: the structure with a placeholder for each tensor. To read them, the
example is described again, as for the call that compiles a model. Containers of the user's own
classes, and constants that are not plain data, cannot be made from a file.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch.arguments import ArgumentSpec, OutputSpec
from popsim_torch.errors import Error
from popsim_torch.files.parts import pack, unpack

__all__ = ["ExampleCall", "pack_structures", "unpack_call", "unpack_outputs"]

_CALL, _OUTPUTS = "call", "outputs"
_MISSING = "missing"

_KINDS = {
    kind.name: kind
    for kind in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    )
}


@dataclass(frozen=True)
class ExampleCall:
    """A call like the one that compiled a model, with tensors that take no memory.

    Attributes:
        signature: The signature of forward, with the parts that calls need.
        args: Positional arguments.
        kwargs: Keyword arguments.
    """

    signature: inspect.Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def spec(self, warned: set[str]) -> ArgumentSpec:
        """Return the required structure of calls.

        Args:
            warned: See ``ArgumentSpec``.
        """
        return ArgumentSpec(self.signature, self.args, self.kwargs, warned=warned)


def pack_structures(arguments: ArgumentSpec, outputs: OutputSpec) -> dict[str, bytes]:
    """Return the sections with the structures of a model's arguments and outputs.

    A part that cannot be written is replaced by the reason, which is the error when the part is
    read.

    Args:
        arguments: The required structure of calls.
        outputs: The outputs of calls.
    """
    return {**_pack_call(arguments), **_pack_outputs(outputs)}


def _pack_call(spec: ArgumentSpec) -> dict[str, bytes]:
    inputs = list(zip(spec.dtypes, spec.shapes, spec.kinds, strict=True))
    for name, (_, _, kind) in zip(spec.names, inputs, strict=True):
        if kind not in (torch.Tensor, torch.nn.Parameter):
            return _reason(_CALL, f"the argument {name} is a {kind.__name__}, not a torch.Tensor")
    described = [(dtype, shape, kind is torch.Tensor) for dtype, shape, kind in inputs]
    tensors = [_placeholder(*one) for one in described]
    args, kwargs = spec.unflatten(tensors)
    parameters = [
        (p.name, p.kind.name, {} if p.default is p.empty else {"default": p.default})
        for p in spec.signature.parameters.values()
    ]
    numbers = {id(tensor): i for i, tensor in enumerate(tensors)}
    try:
        value = {"parameters": parameters, "args": args, "kwargs": kwargs}
        return {
            **pack(_CALL, value, "A call's arguments", numbers),
            **pack(f"{_CALL}.inputs", described, "The inputs"),
        }
    except Error as error:
        return _reason(_CALL, error.message)


def _pack_outputs(spec: OutputSpec) -> dict[str, bytes]:
    tensors = [torch.empty(0) for _ in spec.names]
    numbers = {id(tensor): i for i, tensor in enumerate(tensors)}
    try:
        return {
            **pack(_OUTPUTS, spec.unflatten(tensors), "What forward returns", numbers),
            **pack(f"{_OUTPUTS}.count", len(tensors), "The outputs"),
        }
    except Error as error:
        return _reason(_OUTPUTS, error.message)


def _reason(name: str, text: str) -> dict[str, bytes]:
    return pack(f"{name}.{_MISSING}", text, name)


def _placeholder(dtype: torch.dtype, shape: Sequence[int], is_plain: bool) -> torch.Tensor:
    """Return a tensor of any size that takes the memory of one element."""
    tensor = torch.zeros((), dtype=dtype).expand(tuple(shape))
    return tensor if is_plain else torch.nn.Parameter(tensor, requires_grad=False)


def _check_present(sections: Mapping[str, bytes], name: str) -> None:
    if f"{name}.{_MISSING}" in sections:
        raise Error(
            f"{unpack(sections, f'{name}.{_MISSING}')} Such a model cannot be loaded: compile it "
            "from your own class."
        )


def unpack_call(sections: Mapping[str, bytes]) -> ExampleCall:
    """Return a call like the one that compiled the model of a file.

    Args:
        sections: The sections of the file.

    Raises:
        ValueError: The sections contain no valid call.
        Error: A file cannot hold an argument; the message names it.
    """
    _check_present(sections, _CALL)
    try:
        inputs = unpack(sections, f"{_CALL}.inputs")
        value = unpack(sections, _CALL, [_placeholder(*one) for one in inputs])
        signature = inspect.Signature(
            [
                inspect.Parameter(name, _KINDS[kind], **more)
                for name, kind, more in value["parameters"]
            ]
        )
        return ExampleCall(signature, value["args"], value["kwargs"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"its example call is none: {error!r}") from error


def unpack_outputs(sections: Mapping[str, bytes], num_outputs: int) -> OutputSpec:
    """Return the outputs of the model of a file.

    Args:
        sections: The sections of the file.
        num_outputs: The number of tensors that the program computes.

    Raises:
        ValueError: The outputs do not fit the program.
        Error: A file cannot hold the structure; the message names the problem.
    """
    _check_present(sections, _OUTPUTS)
    if unpack(sections, f"{_OUTPUTS}.count") != num_outputs:
        raise ValueError("its program computes other outputs than it returns")
    tensors = [torch.empty(0) for _ in range(num_outputs)]
    known = {id(tensor) for tensor in tensors}
    value = unpack(sections, _OUTPUTS, tensors)
    with warnings.catch_warnings():
        # No warning for outputs that are not on the device: the compilation has already given one.
        warnings.simplefilter("ignore")
        spec = OutputSpec(value, on_device=lambda tensor: id(tensor) in known)
    if len(spec.names) != num_outputs:
        raise ValueError("its outputs are not those of its program")
    return spec
