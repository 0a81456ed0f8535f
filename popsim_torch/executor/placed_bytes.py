"""The memory that weights and states take on an IPU, as ``Options.TensorLocations`` places them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from popsim_torch.ir import Role, Tensor
from popsim_torch.options import Options

__all__ = ["PlacedBytes", "placed_bytes"]

# The smallest numbers of elements that are moved if the options name no others; those of PopART.
_OFF_CHIP, _SHARDED = 2, 8192


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
    given = options.TensorLocations.toDict()
    place_of: dict[Role, Mapping[str, int]] = {
        Role.PARAMETER: given.get("location_weight", {}),
        Role.STATE: given.get("location_optimizer", {}),
        Role.ACCUMULATOR: given.get("location_accumulator", {}),
    }
    on_chip = off_chip = 0
    for tensor in tensors:
        place = place_of.get(tensor.role, {})
        shares = place.get("useReplicatedTensorSharding") and tensor.numel >= place.get(
            "minElementsForReplicatedTensorSharding", _SHARDED
        )
        numel = -(-tensor.numel // replicas) if shares else tensor.numel
        is_away = not place.get("onChip", 1) and tensor.numel >= place.get(
            "minElementsForOffChip", _OFF_CHIP
        )
        if is_away:
            off_chip += numel * tensor.dtype.itemsize
        else:
            on_chip += numel * tensor.dtype.itemsize
    return PlacedBytes(on_chip, off_chip)
