"""The memory that weights and states take on an IPU, as ``Options.TensorLocations`` places them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from popsim_torch.ir import Tensor
from popsim_torch.machine.placing import Placings
from popsim_torch.options import Options

__all__ = ["PlacedBytes", "placed_bytes"]


@dataclass(frozen=True)
class PlacedBytes:
    """The memory of some tensors for one replica (bytes).

    Attributes:
        on_chip: On its IPUs.
        off_chip: In the memory beside them.
    """

    on_chip: int = 0
    off_chip: int = 0


def placed_bytes(tensors: Iterable[Tensor], options: Options, replicas: int) -> PlacedBytes:
    """Return the memory that weights and states take.

    No value depends on it: this simulator keeps one copy of each tensor for all replicas.

    Args:
        tensors: Parameters, buffers, states of optimizers and accumulators.
        options: The options with the places.
        replicas: Number of replicas that may share a tensor between them.
    """
    placings = Placings(options, replicas)
    on_chip = off_chip = 0
    for tensor in tensors:
        place = placings.of(tensor)
        size = -(-tensor.numel // place.shards) * tensor.dtype.itemsize
        if place.off_chip:
            off_chip += size
        else:
            on_chip += size
    return PlacedBytes(on_chip, off_chip)
