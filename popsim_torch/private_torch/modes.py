"""Modes, which observe calls of functions and of operators, and ways to disable them.

Functions: ``__torch_function__``; operators: ``__torch_dispatch__``.

Why: the public classes only enter a mode and leave it in the opposite order. A trace has to compute
in between without modes, and has to bypass tensor subclasses without an error.
``torch.overrides`` and ``torch.autograd`` offer neither.

Checked: 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    _len_torch_function_stack,
)
from torch._C import _DisableAutocast as DisableAutocast
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._C import _EnableTorchFunction as EnableTorchFunction
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

__all__ = [
    "SET_GRAD_ENABLED",
    "DisableAutocast",
    "DisableTorchDispatch",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "EnableTorchFunction",
    "TorchDispatchMode",
    "disable_current_modes",
    "function_modes",
    "without_function_modes",
]

if TYPE_CHECKING:

    class TorchDispatchMode:
        """A typed declaration of PyTorch's untyped class."""

        def __enter__(self) -> Any: ...

        def __exit__(self, *exception: object) -> None: ...

        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any: ...
else:
    from torch.utils._python_dispatch import TorchDispatchMode

# The function inside of `torch.set_grad_enabled` and others, as a function mode sees it.
SET_GRAD_ENABLED: Any = torch._C._set_grad_enabled

# Returns the function modes that this thread is in, the outermost first.
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack


@contextmanager
def without_function_modes() -> Iterator[None]:
    """Leave all function modes for a scope, and enter them again."""
    pop: Callable[[], Any] = _pop_mode
    push: Callable[[Any], None] = _push_mode
    modes = []
    try:
        while _len_torch_function_stack():
            modes.append(pop())
        yield
    finally:
        for mode in reversed(modes):
            push(mode)
