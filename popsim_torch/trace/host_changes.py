"""Says when code that runs only once changes a tensor of the host in place, as if in each run.

A counter that forward or the body of a loop adds to is changed while the program is recorded, and
by no run of it. What was made in there, or overwritten as a whole, is the code's own to change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from popsim_torch.private_torch.modes import disable_current_modes
from popsim_torch.private_torch.tensors import version_of
from popsim_torch.trace.graph.traced_tensors import (
    has_memory,
    host_computation,
    is_functorch_wrapped_tensor,
    is_host_tensor,
    is_traced,
    tensors_in,
)
from popsim_torch.trace.host_reads import warn_of_host_change

__all__ = ["HostChanges", "call_on_host"]

# Their result has nothing of what was there; the last is called for what Python or NumPy made.
_FRESH = frozenset({"zero_", "fill_", "copy_", "lift_fresh.default"})
# What these make depends on what was there: made again, they make something else.
_ACCUMULATE = frozenset(
    f"{stem}_"
    for stem in (
        *("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow"),
        *("floor_divide", "remainder", "fmod", "neg", "negative", "square", "reciprocal", "lerp"),
        *("addcmul", "addcdiv", "addmm", "addmv", "addr", "addbmm", "baddbmm", "cumsum", "cumprod"),
        *("index_add", "scatter_add", "scatter_reduce", "index_reduce", "logical_not"),
        *("logical_xor", "bitwise_not", "bitwise_xor", "bitwise_left_shift", "bitwise_right_shift"),
    )
) | {
    f"__i{stem}__"
    for stem in ("add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "xor")
}


class HostChanges:
    """Knows which tensors of the host were made while forward is traced.

    Args:
        lasts: Tells whether a tensor of the host is one that the device keeps: a parameter or
            buffer.
    """

    def __init__(self, lasts: Callable[[torch.Tensor], bool]) -> None:
        self._lasts = lasts
        # By the address of their memory, which another may have when it is gone.
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a call that concerns tensors of the host alone."""
        if _accumulates(name, args, kwargs) and not self._is_made(args[0]):
            warn_of_host_change(name)
        result = call_on_host(func, args, kwargs)
        self._note(name, args, result)
        return result

    def notice(self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn of a call that the device makes, if what it changes is lost after each run.

        Args:
            name: That of the function.
            target: Its first argument, as the user's code has it.
            args: The arguments; traced tensors in the place of those that they stand for.
            kwargs: The same.
        """
        if not is_host_tensor(target) or not _accumulates(name, args, kwargs):
            return
        traced = args[0]
        # A traced one may be overwritten, or told of, already.
        own = version_of(traced) > 0 if is_traced(traced) else self._is_made(traced)
        if not own and not self._lasts(target):
            warn_of_host_change(name, on_device=True)

    def clear(self) -> None:
        """Forget the trace."""
        self._made.clear()

    def _is_made(self, tensor: torch.Tensor) -> bool:
        if not has_memory(tensor):
            return True  # nobody else can see it changed
        found = self._made.get(tensor.untyped_storage().data_ptr())
        return found is not None and found() is not None

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Take note of what a call has made, or overwritten as a whole."""
        others = [] if name in _FRESH else list(tensors_in(args))
        given = {one.untyped_storage().data_ptr() for one in others if has_memory(one)}
        for tensor in tensors_in(result):
            if is_host_tensor(tensor) and has_memory(tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:
                    self._made[storage.data_ptr()] = weakref.ref(storage)


def _accumulates(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call changes its first argument to something that depends on what it was."""
    if not args or not isinstance(args[0], torch.Tensor):
        return False
    if kwargs.get("out") is not None:
        return any(kwargs["out"] is one for one in args)
    return name in _ACCUMULATE


def call_on_host(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a call with tensors of the host."""
    if any(is_functorch_wrapped_tensor(value) for value in tensors_in((*args, *kwargs.values()))):
        # Transforms that forward applies to host tensors.
        with disable_current_modes():
            return func(*args, **kwargs)
    with host_computation():
        return func(*args, **kwargs)
