"""``Options._Popart``: settings for the back end of the machine we stand in for.

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
"""Dictionaries whose entries of several calls add up."""


class _PopartOptions(FreezableOptions):
    """Settings by name for the back end of PopTorch.

    Setters of ``Options`` store some of theirs here, and any others may be set. They are checked
    when a model is compiled: an unknown name, or one whose value has another type, is an error.

    popsim_torch has another back end, so only some of these mean something here. Those that only
    steer time, memory, compiler checks, dumps and reports (``enableOutlining``, ``numIOTiles``,
    ``reportOptions``, ``patterns``, ``dotChecks``, ``strictOpVersions`` and their like) have **no
    effect**; ``options/back_end_keys.py`` lists all. Three choose the type of partial sums,
    ``"float"`` or ``"half"``, as ``Options.Precision.setPartialsType`` does for all products:
    ``partialsTypeMatMuls``, the entry ``partialsType`` of ``matmulOptions``, which goes before it,
    and that of ``convolutionOptions``. Other entries of these dictionaries have **no effect**.

    ``autoRecomputation`` is carried out. It says which forward values are rebuilt in the backward
    pass instead of being kept in memory until then; values and weights stay the same to the last
    bit. Not set, it is 3 in a pipeline of several IPUs and 0 everywhere else.

    * 0: None.
    * 1: What is cheap to rebuild, where that saves memory: elementwise ops, norms, softmax, copies.
    * 2: The results of norms and of the elementwise ops directly after them.
    * 3: On each stage everything but what comes from other stages and the tensors given to
      ``recomputationCheckpoint``; on the last stage only what leads to such a tensor.
    * 4: Everything but what comes from other stages, those tensors, and random numbers that are
      drawn out of nothing.

    The copy of a tensor ``t`` in the backward pass is called ``t__re``.

    ``groupNormStridedChannelGrouping`` makes a group of the channels c, c + G, c + 2G, ... of a
    GroupNorm of G groups. ``enableNonStableSoftmax`` leaves out the subtraction that keeps a
    softmax from overflowing, except inside of losses and of ``scaled_dot_product_attention``.

    Settings that would change values in a way that popsim_torch cannot are an error when a model is
    compiled, or a warning, once in a process, where programs set them beside the option that takes
    effect: ``enableGradientAccumulation``, those of several replicas, and
    ``automaticLossScalingSettings.gradientTensorTrackingMethod``.
    """

    _path = "Options._Popart"
    _options: dict[str, Any]

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_options"] = dict(_INITIAL)

    @property
    def matmul_partials(self) -> str | None:
        """``"float"`` or ``"half"``, where a setting chooses the partials of matrix products."""
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
        calls; any other value takes the place of the one before.

        Args:
            key: Its name in the back end.
            value: Its value, which is looked at when a model is compiled.

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

        Those that ask for reports take effect, as ``Options.enableProfiling`` does:
        ``autoReport.all``, ``autoReport.outputGraphProfile``, ``autoReport.outputExecutionProfile``
        (``"true"``) and ``autoReport.directory``. Others have no effect: a warning says so, once
        for each.

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
        """Store which rewriting patterns the compiler may use; they have no effect.

        Args:
            patterns: Whether each pattern is on, by name.
            level: The set of patterns to begin with.

        Returns:
            The object itself.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: ``patterns`` is not a dict from str to bool, or ``level`` no int.
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
        """Return the settings that are not the defaults, as text, in the order of names."""
        items = sorted(self._options.items(), key=lambda item: str(item[0]))
        return {
            str(key): shown(value)
            for key, value in items
            if key not in _INITIAL or value != _INITIAL[key]
        }
