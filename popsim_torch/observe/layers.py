"""Layers that return their input, and capture it."""

from __future__ import annotations

from typing import Any

from torch import nn

from popsim_torch.errors import UsageTypeError
from popsim_torch.feeds import OutfeedQueue
from popsim_torch.observe.queue import MaybeOutfeedQueue
from popsim_torch.ops import op_listener

__all__ = ["MaybeOutfeed", "Outfeed"]


class Outfeed(nn.Module):
    """An identity layer that enqueues its input, as ``{name: x}``.

    It may be anywhere in a model, also in ``nn.Sequential``. On the host it does nothing.

    Args:
        queue: The queue, which no other layer may feed.
        name: Key of the value; None for ``outfeed``.

    Raises:
        UsageTypeError: The queue is something else.
    """

    def __init__(self, queue: OutfeedQueue, name: str | None = None) -> None:
        super().__init__()
        _check_queue("Outfeed", queue, OutfeedQueue)
        self.queue = queue
        self.name = "outfeed" if name is None else _checked_name("Outfeed", name)

    def forward(self, x: Any) -> Any:
        """Return ``x``, a tensor or a nest of tensors."""
        if op_listener.get() is not None:
            self.queue.enqueue({self.name: x})
        return x

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows in brackets."""
        return repr(self.name)


class MaybeOutfeed(nn.Module):
    """An identity layer that offers its input to a queue, which may filter it out.

    Several layers may share a queue. The one that is called last enqueues all collected values:
    only this layer has ``final_outfeed=True``. The layer may be anywhere in a model, also in
    ``nn.Sequential``. On the host it does nothing.

    Args:
        maybe_queue: Collects the values. In a pipeline every stage needs its own queue.
        final_outfeed: Whether to enqueue the collected values, including the value of this layer.
        name: Key of the value; None for ``maybe_outfeed``, and for ``maybe_outfeed_1`` and so on in
            further layers of the queue.

    Raises:
        UsageTypeError: The queue is something else.
    """

    def __init__(
        self,
        maybe_queue: MaybeOutfeedQueue,
        final_outfeed: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__()
        _check_queue("MaybeOutfeed", maybe_queue, MaybeOutfeedQueue)
        if not isinstance(final_outfeed, bool):
            raise UsageTypeError(
                f"MaybeOutfeed: final_outfeed has to be True or False, got {final_outfeed!r}. "
                "The name is the third argument."
            )
        self.queue = maybe_queue
        self.final_outfeed = final_outfeed
        self.name = maybe_queue.name_layer(
            None if name is None else _checked_name("MaybeOutfeed", name)
        )

    def forward(self, x: Any) -> Any:
        """Return ``x``, a tensor or a nest of tensors."""
        if self.queue._is_watching:
            self.queue.maybe_outfeed(self.name, x)
            if self.final_outfeed:
                self.queue.maybe_enqueue()
        return x

    def extra_repr(self) -> str:
        """Return what ``print(model)`` shows in brackets."""
        return f"{self.name!r}, final_outfeed={self.final_outfeed}"


def _check_queue(layer: str, queue: object, wanted: type) -> None:
    if isinstance(queue, wanted):
        return
    takers = {MaybeOutfeedQueue: " MaybeOutfeed takes it.", OutfeedQueue: " Outfeed takes it."}
    raise UsageTypeError(
        f"{layer}: the queue has to be a poptorch.{wanted.__name__}, got a "
        f"{type(queue).__name__}.{takers.get(type(queue), '')}"
    )


def _checked_name(layer: str, name: object) -> str:
    if not isinstance(name, str):
        raise UsageTypeError(f"{layer}: the name has to be a string, got {name!r}.")
    return name
