"""Where ``Options.TensorLocations`` keeps weights and states, and how many replicas share them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from popsim_torch.ir import Role, Tensor
from popsim_torch.options import Options

__all__ = ["Placing", "Placings"]

# The smallest numbers of elements that are moved if the options name no others; those of PopART.
_OFF_CHIP, _SHARDED = 2, 8192


class Placing(NamedTuple):
    """The place of a tensor.

    Attributes:
        shards: The number of replicas that share one copy.
        off_chip: Whether it is in the memory beside the IPUs.
    """

    shards: int = 1
    off_chip: bool = False


class Placings:
    """Places tensors as the options say.

    Args:
        options: The options.
        replicas: Number of replicas that may share a tensor between them.
    """

    def __init__(self, options: Options, replicas: int) -> None:
        given = options.TensorLocations.toDict()
        self._replicas = replicas
        self._place_of: dict[Role, Mapping[str, int]] = {
            Role.PARAMETER: given.get("location_weight", {}),
            Role.STATE: given.get("location_optimizer", {}),
            Role.ACCUMULATOR: given.get("location_accumulator", {}),
        }

    def of(self, tensor: Tensor) -> Placing:
        """Return the place of a tensor."""
        place = self._place_of.get(tensor.role, {})
        shares = place.get("useReplicatedTensorSharding") and tensor.numel >= place.get(
            "minElementsForReplicatedTensorSharding", _SHARDED
        )
        is_away = not place.get("onChip", 1) and tensor.numel >= place.get(
            "minElementsForOffChip", _OFF_CHIP
        )
        return Placing(self._replicas if shares else 1, is_away)
