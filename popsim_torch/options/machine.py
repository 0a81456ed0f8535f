"""``Options.machine``: the simulated machine that estimates are made for. Package private."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from popsim_torch import environment
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.options.base import OptionsGroup, Setting

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MACHINE_VERSIONS", "MachineOptions"]

MACHINE_VERSIONS = {"ipu1": 1, "mk1": 1, "ipu2": 2, "mk2": 2, "ipu21": 21, "bow": 21}
"""The names of the generations of IPUs."""
_OUT_OF_MEMORY = ("warn", "raise", "ignore")
_MOST_TILES = 1472
_SMALL_TILES = 4


class MachineOptions(OptionsGroup):
    """The settings of the simulated machine; no value depends on them."""

    machine_version = Setting.absent(int, "machine")
    machine_tiles = Setting.absent(int, "machine")
    machine_ipus = Setting.absent(int, "machine")
    out_of_memory = Setting("warn", setter="machine", is_key=False)

    def machine(
        self,
        version: str = "ipu2",
        *,
        ipus: int | None = None,
        tiles: int | None = None,
        out_of_memory: Literal["warn", "raise", "ignore"] = "warn",
    ) -> Self:
        """Choose the simulated machine, and estimate at compilation whether the model fits it.

        No value depends on it. Without this call estimates are for the machine that
        ``useOfflineIpuTarget`` or the environment variable ``POPTORCH_IPU_MODEL_VERSION`` names,
        and nothing is estimated unless it is asked for.

        Args:
            version: The generation of the IPUs: ``"ipu1"`` or ``"mk1"``, ``"ipu2"`` or ``"mk2"``,
                ``"ipu21"`` or ``"bow"``.
            ipus: The IPUs that the machine has (count); None for as many as the model takes.
            tiles: The tiles of an IPU (count); None for all of them.
            out_of_memory: What to do if the model does not fit: ``"warn"`` once and go on,
                ``"raise"`` an error at compilation, or ``"ignore"`` it. The estimate of memory is
                off by about 15 %; only what needs more than 115 % of a tile does not fit.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageTypeError: A count is not an int.
            UsageValueError: A name or a count is none of these.
        """
        self.checkIsFrozen()
        if version not in MACHINE_VERSIONS:
            raise UsageValueError(
                f"Options.machine({version!r}): use one of {', '.join(MACHINE_VERSIONS)}."
            )
        if out_of_memory not in _OUT_OF_MEMORY:
            raise UsageValueError(
                f"Options.machine(out_of_memory={out_of_memory!r}): use one of "
                f"{', '.join(map(repr, _OUT_OF_MEMORY))}."
            )
        for name, value, most in (("ipus", ipus, 64), ("tiles", tiles, _MOST_TILES)):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageTypeError(f"Options.machine({name}={value!r}): pass an int.")
            if not 1 <= value <= most:
                raise UsageValueError(f"Options.machine({name}={value}): pass 1 to {most}.")
        found = {"machine_version": MACHINE_VERSIONS[version], "out_of_memory": out_of_memory}
        counts = {"machine_ipus": ipus, "machine_tiles": tiles}
        for name in counts:
            self.deleteIfExists(name)  # of an earlier call
        given = {name: value for name, value in counts.items() if value is not None}
        return self.createOrSet(**found, **given)

    @property
    def _simulated_version(self) -> int:
        """The generation of the simulated IPUs."""
        for name in ("machine_version", "ipu_version"):
            if self.exists(name):
                return int(getattr(self, name))
        return environment.ipu_model_version()

    @property
    def _simulated_tiles(self) -> int | None:
        """The tiles of an IPU; None for all of them."""
        if self.exists("machine_tiles"):
            return int(self.machine_tiles)
        return _SMALL_TILES if environment.flag("POPTORCH_SMALL_IPU_MODEL") else None
