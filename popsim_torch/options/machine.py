"""``Options.machine``: the simulated machine that estimates are made for. Package private."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from popsim_torch import environment
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.options.base import OptionsGroup, Setting

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MACHINE_VERSIONS", "MachineOptions", "SimulatedMachine"]

MACHINE_VERSIONS = {"ipu1": 1, "mk1": 1, "ipu2": 2, "mk2": 2, "ipu21": 21, "bow": 21}
"""The names of the generations of IPUs."""
_TILES = {1: 1216, 2: 1472, 21: 1472}
"""Tiles of an IPU, by generation (count)."""
_OUT_OF_MEMORY = ("warn", "raise", "ignore")
_MOST_IPUS = 64
_SMALL_TILES = 4


@dataclass(frozen=True)
class SimulatedMachine:
    """The machine that estimates are made for.

    Attributes:
        version: The generation of its IPUs: 1, 2 or 21.
        ipus: The IPUs that it has (count); None for as many as a model takes.
        tiles: The tiles of an IPU (count); None for all of them.
        out_of_memory: What to do about a model that does not fit: ``warn``, ``raise`` or
            ``ignore``.
        checks_memory: Whether compilation checks the memory.
    """

    version: int
    ipus: int | None
    tiles: int | None
    out_of_memory: str
    checks_memory: bool


class MachineOptions(OptionsGroup):
    """The settings of the simulated machine; no value depends on them."""

    _machine = Setting[dict[str, Any]]({}, kind=dict, setter="machine", is_key=False)

    def machine(
        self,
        version: str = "ipu2",
        *,
        ipus: int | None = None,
        tiles: int | None = None,
        out_of_memory: Literal["warn", "raise", "ignore"] = "warn",
    ) -> Self:
        """Choose the simulated machine, and estimate at compilation whether the model fits it.

        No value depends on it. It overrules ``useOfflineIpuTarget`` and the environment variables
        ``POPTORCH_IPU_MODEL_VERSION`` and ``POPTORCH_SMALL_IPU_MODEL`` (4 tiles), which choose the
        machine of estimates otherwise. Without this call, compilation estimates nothing.

        Args:
            version: The generation of the IPUs: ``"ipu1"`` or ``"mk1"``, ``"ipu2"`` or ``"mk2"``,
                ``"ipu21"`` or ``"bow"``.
            ipus: The IPUs that the machine has (count); None for as many as the model takes.
            tiles: The tiles of an IPU (count); None for all of them.
            out_of_memory: What to do if the model does not fit: ``"warn"`` and go on, ``"raise"``
                an ``Error`` at compilation, or ``"ignore"`` it. The estimate of memory is off by
                about 15 %; only what needs more than 115 % of a tile does not fit.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageTypeError: A count is not an int.
            UsageValueError: A name or a count is none of these.
        """
        self.checkIsFrozen()
        if not isinstance(version, str) or version not in MACHINE_VERSIONS:
            raise UsageValueError(
                f"Options.machine({version!r}): use one of "
                f"{', '.join(map(repr, MACHINE_VERSIONS))}."
            )
        if not isinstance(out_of_memory, str) or out_of_memory not in _OUT_OF_MEMORY:
            raise UsageValueError(
                f"Options.machine(out_of_memory={out_of_memory!r}): use one of "
                f"{', '.join(map(repr, _OUT_OF_MEMORY))}."
            )
        number = MACHINE_VERSIONS[version]
        _check_count("ipus", ipus, _MOST_IPUS)
        _check_count("tiles", tiles, _TILES[number])
        machine = {"version": number, "ipus": ipus, "tiles": tiles, "out_of_memory": out_of_memory}
        return self.set(_machine=machine)

    @property
    def _simulated(self) -> SimulatedMachine:
        """The machine that estimates are made for."""
        if self._machine:
            return SimulatedMachine(**self._machine, checks_memory=True)
        version = int(self("ipu_version")) if self.exists("ipu_version") else 0
        is_small = environment.flag("POPTORCH_SMALL_IPU_MODEL")
        return SimulatedMachine(
            version=version or environment.ipu_model_version(),
            ipus=None,
            tiles=_SMALL_TILES if is_small else None,
            out_of_memory="warn",
            checks_memory=False,
        )

    def _items(self) -> list[str]:
        return super()._items() + ([f"machine={self._machine}"] if self._machine else [])


def _check_count(name: str, value: object, most: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageTypeError(f"Options.machine({name}={value!r}): pass an int or None.")
    if not 1 <= value <= most:
        raise UsageValueError(f"Options.machine({name}={value}): pass 1 to {most}.")
