"""Tells of host code that looks for gradients in the parameters of a model that the device trains.

A call of a training model runs backward pass and update on the device, so ``parameter.grad`` stays
None. Code that clips gradients, or steps an optimizer, skips such parameters without a word.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

from popsim_torch import logs
from popsim_torch.trace.graph.origin import is_user_code, user_line

__all__ = ["GradientReads"]

_CLIPPING = os.path.join("torch", "nn", "utils", "clip_grad.py")
_OPTIMIZERS = os.path.join("torch", "optim", "")
_MODULES = os.path.join("torch", "nn", "modules", "module.py")
_CALLS = frozenset({"step", "zero_grad"})
_ADVICE = {
    "clip": (
        "Clip in the program: pass max_grad_norm to an optimizer of poptorch.optim, or call it in "
        "a hook of the optimizer (register_step_pre_hook)"
    ),
    "update": "Remove the call",
    "read": (
        "Return the gradient from forward, or anchor 'Gradient___' and the parameter's name "
        "(Options.anchorTensor)"
    ),
}


class GradientReads:
    """Warns once of each kind of code that finds no gradient.

    Attributes:
        on: Whether the device trains the parameters.
    """

    def __init__(self) -> None:
        self.on = False
        self._warned: set[str] = set()

    def notice(self) -> None:
        """Warn if the code that calls the caller has read a gradient, and has got None."""
        if not self.on:
            return
        kind, call = _reader(sys._getframe(2))
        if not kind or kind in self._warned:
            return
        self._warned.add(kind)
        logs.python.warning(
            "%s%s has no effect on the training: gradients are on the device, and parameter.grad "
            "is None. Each call of the compiled model runs the backward pass and the optimizer. "
            "%s.",
            *(call, user_line(" at "), _ADVICE[kind]),
        )


def _reader(frame: FrameType | None) -> tuple[str, str]:
    """Return which code reads: its kind, and the call; two empty texts for code of torch."""
    if frame is None:
        return "", ""
    if is_user_code(frame):
        return "read", "A read of parameter.grad"
    path = frame.f_code.co_filename
    kind = "clip" if path.endswith(_CLIPPING) else "update" if _OPTIMIZERS in path else ""
    if path.endswith(_MODULES) and frame.f_code.co_name == "zero_grad":
        return "update", "zero_grad()"
    call = ""
    while kind and frame is not None and not is_user_code(frame):
        name = frame.f_code.co_name
        if name in _CALLS or (kind == "clip" and not name.startswith("_")):
            call = f"{name}()"
        frame = frame.f_back
    return (kind, call) if call else ("", "")
