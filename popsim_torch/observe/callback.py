"""Prints statistics of the tensors in a queue at the end of each epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from popsim_torch.errors import UsageTypeError
from popsim_torch.feeds import OutfeedMode, OutfeedQueue
from popsim_torch.observe.queue import MaybeOutfeedQueue
from popsim_torch.observe.summary import (
    epoch_title,
    extended_table,
    finite_lines,
    named_leaves,
    summary_table,
)

__all__ = ["OutfeedCallback", "Sink"]


class Sink(Protocol):
    """An object to which an ``OutfeedCallback`` can pass its tensors."""

    def write(self, name: str, epoch: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write the tensors of an epoch.

        Args:
            name: Headline of the callback.
            epoch: The epoch, counted from 1.
            tensors: The tensors by key.
        """


class OutfeedCallback:
    """Empties a queue at the end of each epoch, and prints statistics of its tensors.

    Args:
        queue: The queue to read.
        name: The headline of the printed text.
        extended: Whether to print the table of ``extended_table``, with counts, quantiles and the
            norms of single steps. Without it, a line below the table reports NaN and infinities.
        print_function: Called with each string instead of ``print``.
        sinks: Additional receivers of the tensors: a :class:`SummaryFile`, a :class:`SummaryBoard`,
            or another object with ``write(name, epoch, tensors)``.

    Raises:
        UsageTypeError: The queue is something else, or a sink has no ``write``.
    """

    def __init__(
        self,
        queue: MaybeOutfeedQueue | OutfeedQueue,
        name: str = "OutfeedCallback",
        *,
        extended: bool = False,
        print_function: Callable[[str], object] = print,
        sinks: Iterable[Sink] = (),
    ) -> None:
        if not isinstance(queue, (MaybeOutfeedQueue, OutfeedQueue)):
            raise UsageTypeError(
                "OutfeedCallback: the queue has to be a poptorch.OutfeedQueue or a "
                f"poptorch.MaybeOutfeedQueue, got a {type(queue).__name__}."
            )
        self.queue = queue
        self.name = name
        self._extended = extended
        self._print = print_function
        self._sinks = tuple(sinks)
        for sink in self._sinks:
            if not callable(getattr(sink, "write", None)):
                raise UsageTypeError(
                    f"OutfeedCallback: a {type(sink).__name__} is not a sink. Pass a "
                    "poptorch.SummaryFile, a poptorch.SummaryBoard, or an object with "
                    "write(name, epoch, tensors)."
                )

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Print the statistics of the elements since the last epoch.

        Args:
            epoch: The epoch that has ended, counted from 0; the printed number counts from 1.
            logs: Not used; ``fit`` passes it to callbacks.
        """
        self._print(f"\n{self.name}")
        if not self.queue.enqueued:
            self._print("No data enqueued")
            self._print(self.queue.why_empty())
            return
        keeps_all = self.queue.mode == OutfeedMode.ALL
        element = self.queue.dequeue() if keeps_all else self.queue.poll()
        tensors = {} if element is None else _by_name(element)
        if not any(tensor.numel() for tensor in tensors.values()):
            self._print("No data enqueued")
            self._print("Nothing has come since the queue was read last.")
            return
        for key, tensor in tensors.items():
            self._print(f"key: {key} shape: {tuple(tensor.shape)}")
        self._print(epoch_title(epoch + 1))
        self.print_stats(tensors)
        for sink in self._sinks:
            sink.write(self.name, epoch + 1, tensors)
        if isinstance(self.queue, MaybeOutfeedQueue) and self.queue.note:
            self._print(self.queue.note)

    def print_stats(self, tensors: Mapping[str, Any]) -> None:
        """Print a table with a line of statistics for each tensor.

        Args:
            tensors: Tensors by name.
        """
        if self._extended:
            keeps_all = self.queue.mode == OutfeedMode.ALL
            self._print(extended_table(tensors, steps=keeps_all))
            return
        self._print(summary_table(tensors))
        for line in finite_lines(tensors):
            self._print(line)


def _by_name(element: Any) -> dict[str, torch.Tensor]:
    """Return the dequeued tensors by name; a tensor without a name is called 0."""
    return {name or "0": tensor for name, tensor in named_leaves(element)}
