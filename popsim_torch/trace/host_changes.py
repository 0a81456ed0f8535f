"""Warns when code that runs only once changes a host tensor in place.

A counter that forward or the body of a loop increases changes while the program is recorded, but
not in its runs. Tensors that were made there, or overwritten completely, may be changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
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

# The values are not used; what ``__get__`` returns may be a view, whose use counts.
_METADATA = frozenset(
    {"__get__", "__len__", "size", "dim", "element_size", "numel", "stride", "is_floating_point"}
)
# The result does not depend on the old values; the last one wraps data of Python or NumPy.
_FRESH = frozenset({"zero_", "fill_", "copy_", "lift_fresh.default"})
# The new values depend on the old ones: a second call gives another result.
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
    """Knows which host tensors were made during the trace.

    Args:
        lasts: Returns whether a host tensor is one that the device keeps: a parameter or buffer.
        note_reads: Receives the tensors whose values a call on the host gets.
    """

    def __init__(
        self,
        lasts: Callable[[torch.Tensor], bool],
        note_reads: Callable[[Iterable[torch.Tensor]], None],
    ) -> None:
        self._lasts = lasts
        self._note_reads = note_reads
        # By the address of their memory; other memory may get the address after it is freed.
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a call that uses only host tensors."""
        if _accumulates(name, args, kwargs) and not self._is_made(args[0]):
            warn_of_host_change(name)
        if name not in _METADATA:
            self._note_reads(tensors_in((*args, *kwargs.values())))
        result = call_on_host(func, args, kwargs)
        self._note(name, args, result)
        return result

    def notice(self, name: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn of a call on the device if its change is lost after each run.

        Args:
            name: The name of the function.
            target: Its first argument in the user's code.
            args: The arguments, with traced tensors for host tensors.
            kwargs: The keyword arguments, in the same form.
        """
        if not is_host_tensor(target) or not _accumulates(name, args, kwargs):
            return
        traced = args[0]
        # A traced tensor may already be overwritten, or already have a warning.
        own = version_of(traced) > 0 if is_traced(traced) else self._is_made(traced)
        if not own and not self._lasts(target):
            warn_of_host_change(name, on_device=True)

    def clear(self) -> None:
        """Forget the trace."""
        self._made.clear()

    def _is_made(self, tensor: torch.Tensor) -> bool:
        if not has_memory(tensor):
            return True  # no other code can see the change
        found = self._made.get(tensor.untyped_storage().data_ptr())
        return found is not None and found() is not None

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record the tensors that a call has made, or overwritten completely."""
        others = [] if name in _FRESH else list(tensors_in(args))
        given = {one.untyped_storage().data_ptr() for one in others if has_memory(one)}
        for tensor in tensors_in(result):
            if is_host_tensor(tensor) and has_memory(tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in given:
                    self._made[storage.data_ptr()] = weakref.ref(storage)


def _accumulates(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call changes its first argument to values that depend on the old ones."""
    if not args or not isinstance(args[0], torch.Tensor):
        return False
    if kwargs.get("out") is not None:
        return any(kwargs["out"] is one for one in args)
    return name in _ACCUMULATE


def call_on_host(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute a call with tensors of the host."""
    if any(is_functorch_wrapped_tensor(value) for value in tensors_in((*args, *kwargs.values()))):
        # Transforms that forward applies to host tensors stay active.
        with disable_current_modes():
            return func(*args, **kwargs)
    with host_computation():
        return func(*args, **kwargs)
