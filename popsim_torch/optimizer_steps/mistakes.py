"""Explains what the step of an optimizer does wrong, or what no device can do."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakSet

import torch

from popsim_torch import logs
from popsim_torch.errors import Error
from popsim_torch.private_torch.trees import tree_map_only
from popsim_torch.trace.graph.origin import is_user_code, user_line
from popsim_torch.trace.graph.traced_tensors import host_computation
from popsim_torch.trace.in_place import is_in_place

__all__ = ["LeafChanges", "called", "check_call", "line_of"]

_OF_PYTHON = str(Path(contextlib.__file__).parent)
# Methods that give the memory of a tensor to other libraries.
_LEAVES_TORCH = frozenset({"numpy", "__array__", "data_ptr", "__dlpack__"})


class LeafChanges:
    """Warns once of a step that changes a parameter and records gradients: PyTorch refuses it.

    Args:
        kind: The optimizer's class.
    """

    _warned: ClassVar[WeakSet[type[Any]]] = WeakSet()

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        self._weights: frozenset[int] = frozenset()

    def watch(self, weights: Sequence[torch.Tensor]) -> None:
        """Watch the parameters of the next run of the step."""
        self._weights = frozenset(map(id, weights))

    def watches(self, tensor: object) -> bool:
        """Return whether an object is a parameter of this run."""
        return id(tensor) in self._weights

    def check(self, name: str, args: Sequence[Any]) -> None:
        """Warn if a function of torch changes a parameter in place.

        Args:
            name: The function.
            args: Its arguments.
        """
        if not torch.is_grad_enabled() or not args or self._kind in self._warned:
            return
        if id(args[0]) in self._weights and is_in_place(name) and name != "requires_grad_":
            self._warned.add(self._kind)
            logs.python.warning(
                "The step of %s changes a parameter in place (%s%s) while PyTorch records "
                "gradients. The device does so, but eager PyTorch raises a RuntimeError: a leaf "
                "Variable that requires grad is being used in an in-place operation. Write "
                "@torch.no_grad() above step.",
                self._kind.__name__,
                name,
                user_line(" at "),
            )


def line_of(error: BaseException) -> str:
    """Return `` at file:line`` of the user's code that an exception comes from."""
    found, entry = "", error.__traceback__
    while entry is not None:
        path = entry.tb_frame.f_code.co_filename
        if is_user_code(entry.tb_frame) and not path.startswith(_OF_PYTHON):
            found = f" at {path}:{entry.tb_lineno}"
        entry = entry.tb_next
    return found


def check_call(name: str) -> None:
    """Refuse a function that reads values of a tensor, which has none while a step is traced.

    Raises:
        Error: The function does that.
    """
    if name in _LEAVES_TORCH:
        raise Error(
            f"The step of the optimizer calls Tensor.{name}{user_line(' at ')}: it is traced with "
            "tensors without values, and runs on the device. Compute with functions of torch."
        )


def called(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch; an error says which one it is, and where.

    Raises:
        Error: The function fails.
    """
    try:
        return func(*args, **kwargs)
    except RuntimeError as error:
        text = str(_eager_error(func, args, kwargs) or error)
        raise Error(
            f"The step of the optimizer fails in the call of "
            f"{getattr(func, '__name__', func)}{user_line(' at ')}: {text}"
        ) from None


def _eager_error(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Exception | None:
    """Return the error of the same call with tensors that are full of zeros."""
    with host_computation():
        try:
            values = tree_map_only(
                torch.Tensor,
                lambda one: torch.zeros(one.shape, dtype=one.dtype),
                (list(args), kwargs),
            )
            func(*values[0], **values[1])
        except Exception as error:
            return error.with_traceback(None)
    return None
