"""Adds the layer and the inputs to PyTorch's message about a failed call."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from popsim_torch.errors import Error
from popsim_torch.ir import Origin
from popsim_torch.trace.graph.origin import is_user_code

__all__ = ["arguments_of_call", "explain_failed_call", "explain_failed_gradient"]

_NO_INPUTS = (list, dict)
_NO_TENSOR = "must be Tensor, not "


def arguments_of_call(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a module's call, by the parameter names of its forward."""
    try:
        return inspect.signature(module.forward).bind(*args, **kwargs).arguments
    except (TypeError, ValueError):  # (the module may hide its signature)
        return {}


def explain_failed_call(error: Exception, module: nn.Module, given: Mapping[str, Any]) -> None:
    """Add to an exception's message the layer in which PyTorch has raised it, and its inputs.

    Exceptions that user code or this package has raised do not change.

    Args:
        error: The exception of ``module.forward``; its traceback leads to the call.
        module: The model.
        given: The arguments of its forward, by name.
    """
    frames = _frames(error)
    if isinstance(error, Error) or not frames or is_user_code(frames[-1]):
        return
    text = error.args[0] if len(error.args) == 1 else None
    if not isinstance(text, str):
        return
    lines = [text, _inputs_that_are_no_tensors(text, given), _layer(frames, module)]
    error.args = ("\n".join(filter(None, lines)),)


def explain_failed_gradient(error: Exception, origin: Origin) -> None:
    """Add to an exception's message the call whose gradient PyTorch has refused.

    Args:
        error: The exception of a backward pass.
        origin: The origin of the nodes that were made when it was raised.
    """
    frames = _frames(error)
    if isinstance(error, Error) or not frames or is_user_code(frames[-1]) or not origin.backward:
        return
    if not origin.source or len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    layer = f" in the layer '{origin.scope.replace('/', '.')}'" if origin.scope else ""
    error.args = (f"{error.args[0]}\nThis is the gradient of the call at {origin.source}{layer}.",)


def _frames(error: BaseException) -> list[FrameType]:
    entry, frames = error.__traceback__, []
    while entry is not None:
        frames.append(entry.tb_frame)
        entry = entry.tb_next
    return frames


def _inputs_that_are_no_tensors(text: str, given: Mapping[str, Any]) -> str:
    if _NO_TENSOR not in text:
        return ""
    found = []
    for name, value in given.items():
        if type(value).__module__ == "numpy":
            kind = f"numpy.{type(value).__name__}"
            found.append(f"{name} is a {kind}: torch.from_numpy({name})")
        elif isinstance(value, _NO_INPUTS):
            kind = type(value).__name__
            advice = f"torch.tensor({name})" if kind == "list" else "its tensors one by one"
            found.append(f"{name} is a {kind}: {advice}")
    return f"Pass tensors to the model. The argument {'; '.join(found)}." if found else ""


def _layer(frames: list[FrameType], module: nn.Module) -> str:
    """Return the innermost layer whose forward has failed; empty for the model itself."""
    paths = {id(child): path for path, child in module.named_modules()}
    for frame in reversed(frames):
        called = frame.f_locals.get("self")
        if frame.f_code.co_name == "forward" and paths.get(id(called)):
            shapes = _shapes(frame) if not is_user_code(frame) else ""
            return f"In the layer '{paths[id(called)]}', {_shown(called)}{shapes}."
    return ""


def _shown(layer: Any) -> str:
    is_container = any(True for _ in layer.children())
    return type(layer).__name__ if is_container else repr(layer)


def _shapes(frame: FrameType) -> str:
    """Return the shapes of the tensor arguments of a PyTorch layer."""
    code = frame.f_code
    values = [(name, frame.f_locals.get(name)) for name in code.co_varnames[: code.co_argcount]]
    shapes = [
        f"{name} of shape {tuple(value.shape)}"
        for name, value in values
        if isinstance(value, torch.Tensor)
    ]
    return f", called with {' and '.join(shapes)}" if shapes else ""
