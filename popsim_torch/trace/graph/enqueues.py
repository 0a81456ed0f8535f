"""Elements that forward puts into queues.

``enqueue(xs, key, summed)`` has no result: its node is needed even if nothing reads it. With
``summed``, there is one element for each weight update: the sums over its micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch.dtypes import is_continuous, returned_dtype
from popsim_torch.errors import Error
from popsim_torch.trace.graph.markers import NAMESPACE
from popsim_torch.trace.graph.origin import user_line
from popsim_torch.trace.graph.traced_tensors import find_node, in_transform, of_another_trace
from popsim_torch.typed_torch import new_library


def _register() -> Any:
    library = new_library(NAMESPACE, "FRAGMENT")
    library.define("enqueue(Tensor[] xs, int key, bool summed=False) -> ()")
    torch.library.register_fake(
        f"{NAMESPACE}::enqueue", lambda xs, key, summed=False: None, lib=library
    )
    return library


_library = _register()  # the operator exists as long as this object

ENQUEUE = torch.ops.popsim.enqueue.default
torch.fx.node.has_side_effect(ENQUEUE)


@dataclass(frozen=True)
class Enqueue:
    """An element that forward puts into one queue.

    Attributes:
        queue: An ``OutfeedQueue``.
        structure: The queue's own description of the structure of its elements.
        components: Dtype and shape of each tensor of an element, as the host gets it.
        source: The line of the call.
    """

    queue: Any
    structure: Any
    components: tuple[tuple[torch.dtype, tuple[int, ...]], ...]
    source: str


@dataclass(frozen=True)
class Sums:
    """Puts sums over the micro-batches of a weight update into a queue.

    Attributes:
        dtype: Dtype of the sums; None for the dtype of the values.
    """

    dtype: torch.dtype | None = None

    def addend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a traced tensor converted to the dtype of the sums.

        Raises:
            Error: The tensor has integers or booleans.
        """
        if self.dtype is None and not is_continuous(tensor.dtype):
            raise Error(
                "Sums for a queue need floating-point or complex tensors, but one"
                f"{user_line(' at ')} has the dtype {tensor.dtype}. Pass "
                "accumulate_outfeed_dtype=torch.float32."
            )
        if tensor.is_complex():
            if self.dtype == torch.float16:
                raise Error(
                    f"Sums for a queue{user_line(' at ')}: a tensor is complex, and the device has "
                    "no complex numbers of half precision. Leave out accumulate_outfeed_dtype, or "
                    "pass torch.float32; the sums are torch.complex64 then."
                )
            return tensor
        return tensor if self.dtype is None else tensor.to(self.dtype)


def record_enqueue(
    enqueues: dict[int, Enqueue],
    queue: Any,
    structure: Any,
    tensors: Sequence[torch.Tensor],
    source: str,
    sums: Sums | None = None,
) -> None:
    """Put an element of a queue into the graph.

    Args:
        enqueues: The enqueues of the trace, by key; receives this one.
        queue: The queue.
        structure: The structure of its elements.
        tensors: The traced tensors of the element.
        source: The line of the call.
        sums: Set to put one element for each weight update: the sums over its micro-batches.

    Raises:
        Error: The queue has an element already, or this is a transform of ``torch.func``, or
            tensors without a floating-point dtype would be summed.
    """
    if in_transform():
        raise Error(
            f"OutfeedQueue.enqueue is called{user_line(' at ')} inside of a transform of "
            "torch.func (grad, vmap, ...). Enqueue what the transform returns."
        )
    for known in enqueues.values():
        if known.queue is queue:
            raise Error(
                f"OutfeedQueue.enqueue is called{user_line(' at ')}, but the program enqueues to "
                f"this queue at {known.source} already: a queue can be enqueued to only once in "
                "a program. Enqueue one dictionary with all tensors, or make another queue."
            )
    for tensor in tensors:
        if find_node(tensor) is None:
            raise of_another_trace(tensor)
    key = len(enqueues)
    tensors = [x.detach() if x.requires_grad else x for x in tensors]
    if sums is not None:
        tensors = [sums.addend(x) for x in tensors]
    components = tuple((returned_dtype(x.dtype), tuple(x.shape)) for x in tensors)
    enqueues[key] = Enqueue(queue, structure, components, source)
    torch.ops.popsim.enqueue(tensors, key, sums is not None)
