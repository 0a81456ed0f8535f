"""Warns when code that runs only once changes a host tensor in place.

A counter that forward or the body of a loop increases changes while the program is recorded, but
not in its runs; and values of the device change a copy. Tensors that were made there may be
changed, and others overwritten with values of the host before they are used.
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
from popsim_torch.trace.in_place import changed_tensor

__all__ = ["HostChanges", "call_on_host"]

# The values are not used; what ``__get__`` returns may be a view, whose use counts.
_METADATA = frozenset(
    {"__get__", "__len__", "size", "dim", "element_size", "numel", "stride", "is_floating_point"}
)
# The new values do not depend on the old ones.
_OVERWRITE = frozenset({"zero_", "fill_", "copy_"})
# Wraps data of Python or NumPy.
_LIFT = "lift_fresh.default"
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
        is_constant: Returns whether the device has used the memory of a host tensor.
    """

    def __init__(
        self,
        lasts: Callable[[torch.Tensor], bool],
        note_reads: Callable[[Iterable[torch.Tensor]], None],
        is_constant: Callable[[torch.Tensor], bool],
    ) -> None:
        self._lasts = lasts
        self._note_reads = note_reads
        self._is_constant = is_constant
        # By the address of their memory; other memory may get the address after it is freed.
        # (also of tensors that have a warning)
        self._made: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._overwritten: set[int] = set()
        self._read: set[int] = set()

    def call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compute a call that uses only host tensors."""
        changed = [one for one in _changed(name, args, kwargs) if self._is_older(one)]
        former: list[tuple[torch.Tensor, torch.Tensor]] = []
        if changed and _accumulates(name, args, kwargs):
            self._warn(name, changed[0])
        else:
            read = filter(self._was_read, changed)
            former = [(one, call_on_host(torch.clone, (one,), {})) for one in read]
        if name not in _METADATA:
            self._note_reads(tensors_in((*args, *kwargs.values())))
        result = call_on_host(func, args, kwargs)
        for one, then in former:
            if not call_on_host(torch.equal, (one, then), {}):
                self._warn(name, one)
        self._note(name, args, result)
        return result

    def notice(self, name: str, given: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Warn of a call on the device if its change is lost after each run.

        Args:
            name: The name of the function.
            given: What it changes, in the user's code: a tensor, several, or None.
            args: The arguments, with traced tensors for host tensors.
            kwargs: The keyword arguments, in the same form.
        """
        for host, one in zip(tensors_in(given), _changed(name, args, kwargs), strict=False):
            if not is_host_tensor(host) or self._lasts(host):
                continue
            # A traced tensor may already be overwritten, or already have a warning.
            if not (version_of(one) > 0 if is_traced(one) else self._is_made(one)):
                self._warn(name, host, on_device=True)

    def clear(self) -> None:
        """Forget the trace."""
        for memories in (self._made, self._overwritten, self._read):
            memories.clear()

    def _warn(self, name: str, tensor: torch.Tensor, *, on_device: bool = False) -> None:
        warn_of_host_change(name, on_device=on_device)
        if has_memory(tensor):
            storage = tensor.untyped_storage()
            self._made[storage.data_ptr()] = weakref.ref(storage)

    def _is_made(self, tensor: torch.Tensor) -> bool:
        if not has_memory(tensor):
            return True  # no other code can see the change
        found = self._made.get(tensor.untyped_storage().data_ptr())
        return found is not None and found() is not None

    def _is_older(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor has values from before the trace."""
        if self._is_made(tensor):
            return False
        return tensor.untyped_storage().data_ptr() not in self._overwritten

    def _was_read(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._read or self._is_constant(tensor)

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Record the tensors that a call has made, or overwritten completely, or read."""
        others = [] if name == _LIFT else list(tensors_in(args))
        given = {one.untyped_storage().data_ptr() for one in others if has_memory(one)}
        for tensor in tensors_in(result):
            if is_host_tensor(tensor) and has_memory(tensor):
                storage = tensor.untyped_storage()
                memory = storage.data_ptr()
                if memory not in given:
                    self._made[memory] = weakref.ref(storage)
                elif name in _OVERWRITE and _is_whole(tensor) and not self._was_read(tensor):
                    self._overwritten.add(memory)
                given.discard(memory)
        if name not in _METADATA and name != "__setitem__":
            self._read |= given


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes()


def _changed(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return list(tensors_in(changed_tensor(name, args, kwargs)))


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
