"""``Options.TensorLocations``: where the weights and tensors of a model are kept.

Package private.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from popsim_torch.options.base import OptionsGroup, Setting, require

if TYPE_CHECKING:
    from typing_extensions import Self


class TensorLocationSettings:
    """A description of where one kind of tensor is kept, built by chaining its methods.

    All its settings are hints about memory and time, with no effect on values. Estimates use them:
    see ``Options.TensorLocations``.

    Example:
        ``TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(1024)``
    """

    def __init__(self) -> None:
        self._settings: dict[str, int] = {}

    def minElementsForOffChip(self, min_elements: int) -> Self:
        """Always keep smaller tensors on the chip; no effect on values.

        Args:
            min_elements: The smallest number of values in a tensor that is kept off the chip.

        Returns:
            The object itself.

        Raises:
            UsageAssertionError: The argument is not an int.
        """
        return self._set_int("minElementsForOffChip", min_elements)

    def minElementsForReplicatedTensorSharding(self, min_elements: int) -> Self:
        """Keep smaller tensors as a whole on every replica; no effect on values.

        Args:
            min_elements: The smallest number of values in a tensor that is divided among replicas.

        Returns:
            The object itself.

        Raises:
            UsageAssertionError: The argument is not an int.
        """
        return self._set_int("minElementsForReplicatedTensorSharding", min_elements)

    def useOnChipStorage(self, use: bool | None = True) -> Self:
        """Choose between the memory on the chip and the memory beside it; no effect on values.

        Args:
            use: Whether to use the memory on the chip; None removes the choice.

        Returns:
            The object itself.

        Raises:
            UsageAssertionError: The argument is neither a bool nor None.
        """
        if use is None:
            self._settings.pop("onChip", None)
            return self
        return self._set_bool("onChip", use)

    def useReplicatedTensorSharding(self, use: bool = True) -> Self:
        """Divide the tensor among the replicas; no effect on values.

        Args:
            use: Whether to do so.

        Returns:
            The object itself.

        Raises:
            UsageAssertionError: The argument is not a bool.
        """
        return self._set_bool("useReplicatedTensorSharding", use)

    def useIOTilesToLoad(self, use: bool = True) -> Self:
        """Load the tensor through tiles that are reserved for it; no effect on values.

        Args:
            use: Whether to do so.

        Returns:
            The object itself.

        Raises:
            UsageAssertionError: The argument is not a bool.
        """
        return self._set_bool("useIOTilesToLoad", use)

    def useIOTilesToStore(self, use: bool = True) -> Self:
        """Store the tensor through tiles that are reserved for it; no effect on values.

        Args:
            use: Whether to do so.

        Returns:
            The object itself.

        Raises:
            UsageAssertionError: The argument is not a bool.
        """
        return self._set_bool("useIOTilesToStore", use)

    def toDict(self) -> dict[str, int]:
        """Return the settings by name as a new dictionary, with 0 and 1 for booleans."""
        return dict(self._settings)

    def __repr__(self) -> str:
        settings = ", ".join(f"{key}={value}" for key, value in sorted(self._settings.items()))
        return f"TensorLocationSettings({settings})"

    def _set_int(self, name: str, value: int) -> Self:
        require(isinstance(value, int), f"TensorLocationSettings.{name}({value!r}): pass an int.")
        self._settings[name] = value
        return self

    def _set_bool(self, name: str, value: bool) -> Self:
        require(isinstance(value, bool), f"TensorLocationSettings: {name}={value!r}; pass a bool.")
        self._settings[name] = int(value)
        return self


class _TensorLocationOptions(OptionsGroup):
    """``Options.TensorLocations``: hints about memory and time, with no effect on values.

    Programs move no tensors here. Estimates do: the places of weights, optimizer states and
    accumulators, and tiles for input and output, change simulated memory and cycles. They assume
    that activations stay on the chip.
    """

    _path = "Options.TensorLocations"

    location_activation = Setting[dict[str, int]].absent(dict, "setActivationLocation")
    location_weight = Setting[dict[str, int]].absent(dict, "setWeightLocation")
    location_optimizer = Setting[dict[str, int]].absent(dict, "setOptimizerLocation")
    location_accumulator = Setting[dict[str, int]].absent(dict, "setAccumulatorLocation")

    def numIOTiles(self, num_tiles: int) -> Self:
        """Reserve tiles for input and output; no effect on values.

        Estimates compute on the other tiles, and the host's data moves beside the computation.

        Args:
            num_tiles: The number of tiles per IPU, even, from 32 to 192. It is stored under the
                name of this method: ``options.TensorLocations("numIOTiles")`` returns it.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not such a number.
        """
        require(
            isinstance(num_tiles, int) and 32 <= num_tiles <= 192 and num_tiles % 2 == 0,
            f"Options.TensorLocations.numIOTiles({num_tiles!r}): pass an even number between 32 "
            "and 192.",
        )
        return self.createOrSet(numIOTiles=num_tiles)

    def setActivationLocation(self, location: TensorLocationSettings) -> Self:
        """Choose where activations are kept; no effect on values or on estimates.

        Args:
            location: The place.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a ``TensorLocationSettings``.
        """
        return self.createOrSet(location_activation=_plain("setActivationLocation", location))

    def setWeightLocation(self, location: TensorLocationSettings) -> Self:
        """Choose where weights are kept; no effect on values.

        Args:
            location: The place.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a ``TensorLocationSettings``.
        """
        return self.createOrSet(location_weight=_plain("setWeightLocation", location))

    def setOptimizerLocation(self, location: TensorLocationSettings) -> Self:
        """Choose where the optimizer's state is kept; no effect on values.

        Args:
            location: The place.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a ``TensorLocationSettings``.
        """
        return self.createOrSet(location_optimizer=_plain("setOptimizerLocation", location))

    def setAccumulatorLocation(self, location: TensorLocationSettings) -> Self:
        """Choose where gradient accumulators are kept; no effect on values.

        Args:
            location: The place.

        Returns:
            The group itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a ``TensorLocationSettings``.
        """
        return self.createOrSet(location_accumulator=_plain("setAccumulatorLocation", location))


def _plain(setter: str, location: TensorLocationSettings) -> dict[str, int]:
    require(
        isinstance(location, TensorLocationSettings),
        f"Options.TensorLocations.{setter}({location!r}): pass a TensorLocationSettings.",
    )
    return location.toDict()
