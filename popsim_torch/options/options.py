"""``Options``: everything a user can ask of a model besides the model itself.

Every setter checks its own argument and returns the options, so calls chain. A setting that this
version cannot carry out is an ``Error`` when a model is wrapped or compiled, never ignored; one
that has no effect on a simulated machine says so in its documentation. The groups ``Training``,
``Precision``, ``Jit``, ``TensorLocations``, ``Distributed`` and ``_Popart`` are attributes.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import torch

from popsim_torch.enums import CommGroupType
from popsim_torch.errors import (
    ConfigFileError,
    Error,
    UsageValueError,
)
from popsim_torch.options import text
from popsim_torch.options.base import Setting, require, require_bool, require_enum
from popsim_torch.options.groups import (
    _DistributedOptions,
    _JitOptions,
    _PrecisionOptions,
    _TrainingOptions,
)
from popsim_torch.options.host import HostOptions
from popsim_torch.options.locations import TensorLocationSettings, _TensorLocationOptions
from popsim_torch.options.outputs import OutputOptions
from popsim_torch.options.popart import _PopartOptions
from popsim_torch.options.progress import CompilationProgressBar

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ConfigFileError", "Options", "TensorLocationSettings"]

_logger = logging.getLogger("poptorch::python")

_NORMAL_DATA = 2
"""The ``syntheticDataMode`` of the back end that draws normal values."""


class Options(OutputOptions, HostOptions):
    """The settings of a model and of its data loader.

    New options hold the defaults, changed by the environment: ``POPTORCH_CACHE_DIR`` stands for a
    call of ``enableExecutableCaching``, then ``POPTORCH_DEFAULT_OPTIONS`` (JSON) for one of
    ``from_json``. Values are read by their names in snake case, ``options.device_iterations``, and
    can be assigned.

    ``trainingModel``, ``inferenceModel`` and ``DataLoader`` freeze the options they are given; use
    ``clone()`` for a copy that can be changed.

    Raises:
        Error: The environment asks for something that does not exist or is not supported.

    Example:
        ::

            options = poptorch.Options().deviceIterations(16).randomSeed(42)
            options.Training.gradientAccumulation(8)
    """

    device_iterations = Setting(1, setter="deviceIterations")
    replication_factor = Setting(1, setter="replicationFactor")
    input_group_size = Setting(1, setter="inputReplicaGrouping")
    input_cgt = Setting(
        int(CommGroupType.Consecutive), enum=CommGroupType, setter="inputReplicaGrouping"
    )
    broadcast_buffers = Setting(True, setter="broadcastBuffers")
    random_seed = Setting.absent(int, "randomSeed")

    Training: _TrainingOptions
    """Gradient accumulation, its mean, and automatic loss scaling."""
    Precision: _PrecisionOptions
    """Floating-point exceptions, stochastic rounding, and the type of partial sums."""
    Jit: _JitOptions
    """Deprecated; a warning, as in PopTorch."""
    TensorLocations: _TensorLocationOptions
    """Where a real machine keeps tensors; no effect here."""
    Distributed: _DistributedOptions
    """Which part of the data each of several processes loads."""

    def __init__(self) -> None:
        super().__init__()
        popart = _PopartOptions()
        self.__dict__.update(
            Training=_TrainingOptions(popart),
            Precision=_PrecisionOptions(popart),
            Jit=_JitOptions(),
            TensorLocations=_TensorLocationOptions(),
            Distributed=_DistributedOptions(),
            _Popart=popart,
        )
        cache = os.environ.get("POPTORCH_CACHE_DIR")
        if cache:
            _logger.info("The environment variable POPTORCH_CACHE_DIR caches programs in %s", cache)
            self.enableExecutableCaching(cache)
        defaults = os.environ.get("POPTORCH_DEFAULT_OPTIONS")
        if defaults:
            try:
                self.from_json(defaults)
            except Exception as error:
                raise Error(
                    "Options(): the environment variable POPTORCH_DEFAULT_OPTIONS cannot be "
                    f"applied. {error} Correct the variable or unset it."
                ) from error

    def deviceIterations(self, device_iterations: int) -> Self:
        """Set how often the device repeats the whole step per call.

        The input needs that many times more data, and training updates the weights that often. The
        range is checked when the model is compiled.

        Args:
            device_iterations: Repetitions (count); 1 by default.

        Returns:
            The options.

        Raises:
            UsageAssertionError: It is not an int.
        """
        return self.set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Set how many copies of the model share the data.

        Args:
            replication_factor: Copies (count); 1 by default. This version runs one: another
                number is an error when a model is wrapped.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: It is not an int.
        """
        return self.set(replication_factor=replication_factor)

    def inputReplicaGrouping(
        self, input_group_size: int, input_group_type: CommGroupType = CommGroupType.Consecutive
    ) -> Self:
        """Give the replicas of one group the same input; call it after ``replicationFactor``.

        It has no effect on one replica, the only number this version runs.

        Args:
            input_group_size: Replicas per group (count); 1 by default.
            input_group_type: How replicas are grouped. ``NoGrouping`` stands for groups of one.

        Returns:
            The options.

        Raises:
            UsageAssertionError: An argument has the wrong type.
            UsageValueError: The type is ``All``, or the size does not divide the replicas.
        """
        call = f"Options.inputReplicaGrouping({input_group_size!r}, {input_group_type!r})"
        require(isinstance(input_group_size, int), f"{call}: the size must be an int.")
        require_enum(call, input_group_type, CommGroupType)
        if input_group_type == CommGroupType.All:
            raise UsageValueError(f"{call}: CommGroupType.All cannot group inputs.")
        if input_group_type == CommGroupType.NoGrouping:
            return self.set(input_group_size=1, input_cgt=CommGroupType.Consecutive)
        if input_group_size < 1 or self.replication_factor % input_group_size != 0:
            raise UsageValueError(
                f"{call}: the size must divide the replication factor, {self.replication_factor}."
            )
        return self.set(input_group_size=input_group_size, input_cgt=input_group_type)

    def broadcastBuffers(self, broadcast_buffers: bool = True) -> Self:
        """Choose whether the replicas of a buffer are kept equal.

        It has no effect on one replica, the only number this version runs.

        Args:
            broadcast_buffers: True, the default, refuses models that change a buffer on several
                replicas; False gives every replica its own.

        Returns:
            The options.

        Raises:
            UsageAssertionError: It is not a bool.
        """
        return self.set(broadcast_buffers=broadcast_buffers)

    def randomSeed(self, random_seed: int) -> Self:
        """Set the seed of the device's random numbers, and at once ``torch.manual_seed`` too.

        Args:
            random_seed: The seed, from -2**63 to 2**64 - 1; a negative one stands for the seed that
                is 2**64 higher. Without this call the device's seed is unspecified, and
                ``exists("random_seed")`` is False.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: It is not an int.
            UsageValueError: It is out of range.
        """
        if isinstance(random_seed, int) and not -(2**63) <= random_seed < 2**64:
            raise UsageValueError(
                f"Options.randomSeed({random_seed}): the seed must be from -2**63 to 2**64 - 1."
            )
        self.createOrSet(random_seed=random_seed)
        torch.manual_seed(self.random_seed)
        return self

    def enableStableNorm(self, enabled: bool) -> Self:
        """Compute the variances of norm layers more accurately: as popsim_torch always does.

        It has **no effect**, on values or speed. Batch, group, instance and layer norm compute the
        mean first and the variance from the differences to it, in float32 also for float16; never
        as the difference of two large numbers, ``mean(x^2) - mean(x)^2``.

        Args:
            enabled: Whether to do so.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: It is not a bool.
        """
        require_bool("Options.enableStableNorm", enabled)
        self._Popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled: bool) -> Self:
        """Run on random data made on the device; what comes back has no meaning.

        The model is called as ever, with tensors that tell shapes and types, but nothing is read of
        them. Floating-point inputs hold numbers of the normal distribution with mean 0 and
        deviation 1, new ones for every micro-batch, which follow from ``randomSeed``. Integers are
        0 and booleans False: valid as labels and as indices. Outputs have the shapes and types
        that they always have, and hold what the model makes of those numbers; training changes the
        weights by them. Inputs that forward changes in place stay as they are on the host.

        Args:
            enabled: Whether to do so; False by default.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: It is not a bool.
        """
        require_bool("Options.enableSyntheticData", enabled)
        self._Popart.set("syntheticDataMode", _NORMAL_DATA if enabled else 0)
        return self

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """List the buffers ``copyNamedBuffersToDevice`` uploads.

        Args:
            buffers: Names of buffers of the model.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: It is not a list of strings.
        """
        require(
            isinstance(buffers, list) and all(isinstance(name, str) for name in buffers),
            f"Options.updatableNamedBuffers({buffers!r}): pass a list of strings.",
        )
        self._Popart.set("updatableNamedBuffers", list(buffers))
        return self

    def loadFromFile(self, filepath: str | os.PathLike[str]) -> Self:
        """Run the lines of a text file as Python, each after ``options.``.

        A line is a call or an assignment, for instance ``deviceIterations(4)``,
        ``Training.gradientAccumulation(8)  # comment`` or
        ``Precision.setPartialsType(torch.half)``. It may use the names ``poptorch``, ``torch`` and
        ``options``. Blank lines and lines that begin with ``#`` are skipped. The file may do
        whatever a Python program may: load only files that you trust.

        Args:
            filepath: The file, UTF-8 text.

        Returns:
            The options.

        Raises:
            ConfigFileError: A line is not Python; names the line, counted without those that are
                skipped. No line of the file has run then.
            OSError: The file cannot be read.
            Exception: What a line raises.
        """
        text.apply_file(self, filepath)
        return self

    def from_json(self, string: str) -> Self:
        """Apply the settings of a JSON object.

        Args:
            string: An object with a setter per key, such as ``{"Training.gradientAccumulation":
                8}``. A list stands for several arguments; a string like ``"OutputMode.All"`` for
                the enum value, if there is one.

        Returns:
            The options.

        Raises:
            UsageValueError: It is not a JSON object.
            UsageAttributeError: There is no such setter.
            Exception: What the setter raises.
        """
        text.apply_json(self, string)
        return self

    def clone(self) -> Self:
        """Return an independent copy that is not frozen, groups included."""
        return self.__copy__()

    def toDict(self) -> dict[str, Any]:
        """Return the settings of the strategy, ``_Popart``, the options and the groups as one dict.

        With the progress bar on, ``compilation_progress_bar_fn`` is a function to draw it.

        Raises:
            UsageAssertionError: The output mode is still ``Default``, or two groups hold the same
                key.
        """
        require(
            not self.defaultOutputMode(),
            "Options.toDict: the output mode is still Default. Call Options.outputMode first.",
        )
        merged: dict[str, Any] = {}
        for part in (
            self.execution_strategy.backend_options(),
            self._Popart.options,
            self._keys(),
            self.Training.toDict(),
            self.Distributed.toDict(),
            self.TensorLocations.toDict(),
        ):
            for key, value in part.items():
                require(key not in merged, f"Options.toDict: two groups hold the key '{key}'.")
                merged[key] = value
        if self.show_compilation_progress_bar:
            merged["compilation_progress_bar_fn"] = CompilationProgressBar()
        return merged

    def __repr__(self) -> str:
        lines = [*self._items(), *(repr(part) for part in self._parts().values())]
        return "Options(" + ",\n        ".join(lines) + ")"

    def _figures(self) -> dict[str, object]:
        """Return what is not the default, also of the groups, as text by path."""
        found = super()._figures()
        strategy = self._settings()["execution_strategy"].default
        if repr(self.execution_strategy) != repr(strategy):
            found["execution_strategy"] = repr(self.execution_strategy)
        for name, part in self._parts().items():
            found |= {f"{name}.{key}": value for key, value in part._figures().items()}
        return found
