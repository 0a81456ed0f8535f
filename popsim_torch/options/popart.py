"""``Options._Popart``: settings for the back end of the real machine.

Package private.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from popsim_torch.options.base import FreezableOptions, require, shown

if TYPE_CHECKING:
    from typing_extensions import Self

_logger = logging.getLogger("poptorch::python")

_INITIAL: dict[str, Any] = {
    "instrumentWithHardwareCycleCounter": False,
    "rearrangeAnchorsOnHost": False,
}

_PRODUCT_OPTIONS = ("convolutionOptions", "matmulOptions")
"""Dictionaries to which several calls add entries."""


class _PopartOptions(FreezableOptions):
    """Settings by name for the back end of PopTorch.

    Some setters of ``Options`` store their settings here, and the user may set any others. They are
    checked when a model is compiled: an unknown name, or a value of a wrong type, is an error.

    popsim_torch has another back end, so only some settings have a meaning here. Settings that
    concern only time, memory, compiler checks, dumps and reports (``enableOutlining``,
    ``numIOTiles``, ``reportOptions``, ``patterns``, ``dotChecks``, ``strictOpVersions`` and similar
    ones) have **no effect**; ``options/back_end_keys.py`` lists all. Three settings choose the
    dtype of partial sums, ``"float"`` or ``"half"``, as ``Options.Precision.setPartialsType`` does
    for all products: ``partialsTypeMatMuls``; the entry ``partialsType`` of ``matmulOptions``,
    which overrides it; and the same entry of ``convolutionOptions``. Other entries of these
    dictionaries have **no effect**.

    ``autoRecomputation`` takes effect. It chooses which forward values the backward pass rebuilds,
    instead of keeping them in memory; all values and weights stay exactly the same. If it is not
    set, it is 3 in a pipeline of several IPUs and 0 in all other models.

    * 0: None.
    * 1: Values that are cheap to rebuild, if that saves memory: element-wise ops, norms, softmax,
      copies.
    * 2: The results of norms and of the element-wise ops directly after them.
    * 3: On each stage all values except those of other stages and the tensors that
      ``recomputationCheckpoint`` marks; on the last stage only the values that such a tensor is
      computed from.
    * 4: All values except those of other stages, the marked tensors, and random numbers that
      depend on no other value.

    The copy of a tensor ``t`` in the backward pass is called ``t__re``.

    ``groupNormStridedChannelGrouping`` makes a group of the channels c, c + G, c + 2G, ... of a
    GroupNorm of G groups. ``enableNonStableSoftmax`` leaves out the subtraction that prevents
    overflow in a softmax, except inside of losses and of ``scaled_dot_product_attention``.

    Settings that would change values in a way that popsim_torch does not support are an error when
    a model is compiled. Some cause only a warning, once per process, because programs set them in
    addition to the option that takes effect: ``enableGradientAccumulation``, those of several
    replicas, and ``automaticLossScalingSettings.gradientTensorTrackingMethod``.
    """

    _path = "Options._Popart"
    _options: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_options"] = dict(_INITIAL)

    @property
    def matmul_partials(self) -> str | None:
        """``"float"`` or ``"half"``, if a setting chooses the partials of matrix products."""
        partials: str | None = self._options.get("matmulOptions", {}).get(
            "partialsType", self._options.get("partialsTypeMatMuls")
        )
        return partials

    @property
    def convolution_partials(self) -> str | None:
        """The same for convolutions."""
        partials: str | None = self._options.get("convolutionOptions", {}).get("partialsType")
        return partials

    @property
    def options(self) -> dict[str, Any]:
        """The settings themselves, by name."""
        return self._options

    def set(self, key: str, value: Any) -> Self:
        """Store one setting.

        The entries of ``convolutionOptions`` and ``matmulOptions`` are added to those of earlier
        calls; any other value replaces the earlier one.

        Args:
            key: The name in the back end.
            value: The value, which is checked when a model is compiled.

        Returns:
            The object itself.

        Raises:
            UsageAttributeError: The options are frozen.
        """
        self.checkIsFrozen()
        earlier = self._options.get(key)
        if key in _PRODUCT_OPTIONS and isinstance(earlier, dict) and isinstance(value, dict):
            value = {**earlier, **value}
        if key == "logDir":
            _logger.warning("Options._Popart.set('logDir', ...) is ignored. Use Options.logDir.")
        self._options[key] = value
        return self

    def setEngineOptions(self, engine_options: dict[str, str]) -> Self:
        """Store options of the execution engine.

        Options for reports take effect, as ``Options.enableProfiling`` does: ``autoReport.all``,
        ``autoReport.outputGraphProfile``, ``autoReport.outputExecutionProfile`` (``"true"``) and
        ``autoReport.directory``. Others have no effect: a warning says so once for each.

        Args:
            engine_options: Values by option name, replacing those stored before.

        Returns:
            The object itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a dictionary.
        """
        require(
            isinstance(engine_options, dict),
            f"Options._Popart.setEngineOptions({engine_options!r}): pass a dict.",
        )
        return self.set("engineOptions", dict(engine_options))

    def setPatterns(self, patterns: dict[str, bool], level: int = 2) -> Self:
        """Store which rewrite patterns the compiler may use; they have no effect.

        Args:
            patterns: Whether each pattern is on, by name.
            level: The set of patterns to start from.

        Returns:
            The object itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: ``patterns`` is not a dict from strings to booleans, or ``level``
                is not an int.
        """
        call = f"Options._Popart.setPatterns({patterns!r}, {level!r})"
        require(isinstance(patterns, dict), f"{call}: pass a dict of names to bool.")
        require(
            all(isinstance(k, str) and isinstance(v, bool) for k, v in patterns.items()),
            f"{call}: the names must be strings and the values bool.",
        )
        require(isinstance(level, int), f"{call}: the level must be an int.")
        return self.set("patterns", dict(patterns)).set("patterns_level", level)

    def __repr__(self) -> str:
        items = sorted(self._options.items(), key=lambda item: str(item[0]))
        return f"_Popart({', '.join(f'{key}={shown(value)}' for key, value in items)})"

    def _figures(self) -> dict[str, object]:
        """Return the settings that are not the defaults, as strings, sorted by name."""
        items = sorted(self._options.items(), key=lambda item: str(item[0]))
        return {
            str(key): shown(value)
            for key, value in items
            if key not in _INITIAL or value != _INITIAL[key]
        }
