"""Operations that user code calls inside a model's ``forward``.

Outside of tracing (a plain run on the CPU) they are identities or the plain PyTorch operation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from popsim_torch.enums import OverlapMode
from popsim_torch.errors import Error, UsageAssertionError, UsageKeyError, UsageValueError

__all__ = [
    "NameScope",
    "PrintFormat",
    "getIpuTensorId",
    "identity_loss",
    "ipu_print_tensor",
    "isRunningOnIpu",
    "nop",
    "recomputationCheckpoint",
    "set_available_memory",
]

_FLOAT_FORMATS = ("auto", "fixed", "scientific", "none")
_REDUCTIONS = ("sum", "mean", "none")


@dataclass(frozen=True)
class PrintFormat:
    """The format of ``ipu_print_tensor``; the fields are its arguments of the same names."""

    summarise_threshold: int = 1000
    """Tensors of more elements show only their edges (count); 0: none do."""
    edge_items: int = 3
    """Elements kept at both ends of a dimension (count)."""
    max_line_width: int = 80
    """Where a row is broken (characters); 0: never."""
    digits: int = 4
    """Significant digits of the largest element; 0: as many as the value needs."""
    float_format: str = "auto"
    """``auto``, ``fixed``, ``scientific`` or ``none``."""
    separator: str = ","
    """Separates elements."""
    open_bracket: str = "("
    """Opens a dimension."""
    close_bracket: str = ")"
    """Closes a dimension."""


class OpListener(Protocol):
    """The methods of the tracer that user code calls through these operations."""

    def print_tensor(
        self, tensor: torch.Tensor, title: str, print_gradient: bool, text_format: PrintFormat
    ) -> torch.Tensor:
        """Return ``tensor``, printed at run time."""

    def enqueue(self, queue: Any, structure: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Put an element into a queue each time the program runs this operation.

        Args:
            queue: An ``OutfeedQueue``.
            structure: The queue's description of what its elements are made of.
            tensors: The tensors of an element.
        """

    def identity_loss(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Reduce a tensor, mark the result as a loss, and return it."""

    def checkpoint(self, tensor: torch.Tensor) -> None:
        """Keep the value of ``tensor`` for the backward pass; other values are rebuilt."""

    def for_loop(
        self, count: int, body: Callable[..., Any], inputs: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Record a loop and return its results."""

    def cond(
        self,
        condition: Any,
        if_true: tuple[Callable[..., Any], list[Any]],
        if_false: tuple[Callable[..., Any], list[Any]],
    ) -> list[torch.Tensor]:
        """Record a branch between two functions, each with its arguments; return its results."""

    def tensor_id(self, tensor: torch.Tensor) -> int:
        """Return the unique number of a tensor in this trace; raise an error for host tensors."""

    def custom_op(self, inputs: Sequence[torch.Tensor], call: Any) -> list[torch.Tensor]:
        """Return the results of a custom operator."""

    def multi_conv(self, check: Callable[[int], None]) -> contextlib.AbstractContextManager[None]:
        """Group the convolutions in the scope, and call ``check`` with their number."""

    def rebuilt_region(self) -> contextlib.AbstractContextManager[None]:
        """Let the backward pass rebuild the values that the scope computes."""

    def overlap(self, tensor: torch.Tensor, mode: OverlapMode, *, for_input: bool) -> torch.Tensor:
        """Return ``tensor``, marked as an input or output whose transfer overlaps computation."""

    def at_end(self, ending: Callable[[], None]) -> None:
        """Call ``ending`` when all of forward has been traced."""

    def as_autocast(self, operator: str, tensors: Any) -> Any:
        """Return the tensors, cast as autocast casts the arguments of an ATen operator here."""

    def name_scope(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Put ``name`` before the names of the operations in the scope."""


op_listener: ContextVar[OpListener | None] = ContextVar("op_listener", default=None)
"""Set while a model is being traced, None otherwise."""


in_compile_hook: ContextVar[bool] = ContextVar("in_compile_hook", default=False)
"""Set while a compile hook runs, which is before or after the model is traced."""


def isRunningOnIpu() -> bool:
    """Return True while a model is being compiled: inside its ``forward``, and in the hooks."""
    return op_listener.get() is not None or in_compile_hook.get()


def getIpuTensorId(tensor: torch.Tensor) -> int:
    """Return the number of a tensor on the device, which is unique in the model.

    Args:
        tensor: A tensor inside of ``forward``, while the model is compiled.

    Raises:
        Error: ``tensor`` is not a tensor, or not on the device.
    """
    _require_tensor(tensor, "getIpuTensorId")
    listener = op_listener.get()
    if listener is None:
        raise Error(
            "getIpuTensorId: tensors have a number only inside of the forward of a model that is "
            f"being compiled; got a tensor on {tensor.device} outside of it."
        )
    return listener.tensor_id(tensor)


def _require_tensor(value: object, function: str) -> None:
    if not isinstance(value, torch.Tensor):
        refused = getattr(value, "refused", None)  # (elements at a mask: the error says what to do)
        if callable(refused):
            raise refused(function)
        raise Error(f"{function}: needs a torch.Tensor, got {type(value).__name__}")


def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Print a tensor on the process's stderr each time the device computes it.

    The rest of the model has to use the returned tensor: otherwise the print is removed, as all
    unused operations are. Outside of a traced model the function does nothing.

    Args:
        tensor: The tensor to print; any shape, and any dtype that the device supports.
        title: The string before the values; if empty, the tensor's name in the graph.
        print_gradient: Whether to print the gradient of the tensor in each backward pass as well,
            under ``<title>_gradient`` (``Gradient___<name>`` without a title). It is multiplied by
            the optimizer's ``loss_scaling``.
        summarise_threshold: With more elements than this, show only the edges; 0: show all.
        edge_items: Elements kept at both ends of a dimension when summarising.
        max_line_width: Characters before a row is broken; 0: never.
        digits: Significant digits of the largest element; 0: as many as the value needs.
        float_format: ``auto``, ``fixed``, ``scientific`` or ``none``.
        separator: Its first character separates elements.
        open_bracket: Its first character opens a dimension.
        close_bracket: Its first character closes a dimension.

    Returns:
        A tensor with the values of ``tensor``.

    Raises:
        Error: ``tensor`` is not a tensor.
        UsageKeyError: ``float_format`` is not one of the four.
    """
    _require_tensor(tensor, "ipu_print_tensor")
    if float_format not in _FLOAT_FORMATS:
        raise UsageKeyError(
            f"ipu_print_tensor: float_format {float_format!r} is not one of "
            f"{', '.join(_FLOAT_FORMATS)}"
        )
    listener = op_listener.get()
    if listener is None:
        return tensor
    text_format = PrintFormat(
        int(summarise_threshold),
        int(edge_items),
        int(max_line_width),
        int(digits),
        float_format,
        separator[:1],
        open_bracket[:1],
        close_bracket[:1],
    )
    return listener.print_tensor(tensor, str(title), bool(print_gradient), text_format)


def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark a tensor as a loss and reduce it.

    Args:
        x: Any shape, floating point.
        reduction: ``"sum"``, ``"mean"`` or ``"none"``.

    Returns:
        The reduced tensor: 0-d for sum and mean, ``x`` itself for none.

    Raises:
        Error: ``x`` is not a tensor.
        UsageAssertionError: Another reduction.
    """
    _require_tensor(x, "identity_loss")
    if reduction not in _REDUCTIONS:
        raise UsageAssertionError(
            f"identity_loss: Unsupported reduction type! Got {reduction!r}, "
            f"use one of {', '.join(map(repr, _REDUCTIONS))}."
        )
    listener = op_listener.get()
    if listener is not None:
        return listener.identity_loss(x, reduction)
    return x if reduction == "none" else getattr(x, reduction)()


class NameScope:
    """Context manager that puts a name before the names of operations and tensors.

    Args:
        name: The scope's name; may contain slashes.

    Raises:
        UsageAssertionError: ``name`` is not a string.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str):
            raise UsageAssertionError(
                f"NameScope: the name must be a string, got {type(name).__name__}"
            )
        self._name = name
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        listener = op_listener.get()
        if listener is not None:
            self._stack.enter_context(listener.name_scope(self._name))

    def __exit__(self, *exception: object) -> None:
        self._stack.close()


def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor.

    Raises:
        Error: ``tensor`` is not a tensor.
    """
    _require_tensor(tensor, "nop")
    return tensor


def recomputationCheckpoint(
    *tensors: torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...],
) -> torch.Tensor | list[torch.Tensor] | tuple[torch.Tensor, ...]:
    """Keep these tensors for the backward pass; recomputation rebuilds others from them.

    Recomputation is on in a pipeline, and with ``Options._Popart.set("autoRecomputation", mode)``.
    It does not change values.

    Args:
        *tensors: Tensors, or one list or tuple of tensors.

    Returns:
        A single argument as it is (tensor, list or tuple), several as a tuple.

    Raises:
        Error: One of them is not a tensor. (Also a ``ValueError``.)
    """

    def leaves() -> Iterator[object]:
        for item in tensors:
            if isinstance(item, (list, tuple)):
                yield from item
            else:
                yield item

    listener = op_listener.get()
    for position, leaf in enumerate(leaves()):
        if not isinstance(leaf, torch.Tensor):
            raise UsageValueError(
                f"recomputationCheckpoint: argument {position} is a {type(leaf).__name__}, "
                "not a torch.Tensor"
            )
        if listener is not None:
            listener.checkpoint(leaf)
    return tensors[0] if len(tensors) == 1 else tensors  # type: ignore[return-value]


def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Return the tensor. The proportion of tile memory is a hint to real hardware: no effect here.

    Estimates use ``Options.setAvailableMemoryProportion``, which is for a whole IPU.

    Args:
        tensor: Output of a matmul or convolution.
        available_memory_proportion: Share of the tile memory its producer may use.

    Raises:
        Error: ``tensor`` is not a tensor.
    """
    _require_tensor(tensor, "set_available_memory")
    return tensor
