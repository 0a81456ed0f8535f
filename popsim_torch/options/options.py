"""``Options``: the settings of a model and of its runs.

Every setter checks its argument and returns the options, so calls can be chained. A setting that
this version does not support raises an ``Error`` when a model is wrapped or compiled; it is never
ignored. If a setting has no effect on a simulated machine, its documentation says so. The groups
``Training``, ``Precision``, ``Jit``, ``TensorLocations``, ``Distributed`` and ``_Popart`` are
attributes.
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
from popsim_torch.options.distributed import _DistributedOptions
from popsim_torch.options.groups import (
    _JitOptions,
    _PrecisionOptions,
    _TrainingOptions,
)
from popsim_torch.options.host import HostOptions
from popsim_torch.options.locations import TensorLocationSettings, _TensorLocationOptions
from popsim_torch.options.machine import MachineOptions
from popsim_torch.options.observing import ObservingOptions
from popsim_torch.options.popart import _PopartOptions
from popsim_torch.options.progress import CompilationProgressBar
from popsim_torch.options.watching import WatchOptions

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ConfigFileError", "Options", "TensorLocationSettings"]

_logger = logging.getLogger("poptorch::python")

_NORMAL_DATA = 2
"""The ``syntheticDataMode`` of the back end with random numbers of the normal distribution."""


class Options(ObservingOptions, MachineOptions, HostOptions, WatchOptions):
    """The settings of a model and of its data loader.

    New options hold the defaults, changed by two environment variables: ``POPTORCH_CACHE_DIR`` has
    the effect of a call of ``enableExecutableCaching``, and after it ``POPTORCH_DEFAULT_OPTIONS``
    (JSON) that of a call of ``from_json``. Values are attributes with names in snake case, such as
    ``options.device_iterations``, which can be read and assigned.

    ``trainingModel``, ``inferenceModel`` and ``DataLoader`` freeze the options that they get; use
    ``clone()`` for a copy that can be changed.

    Raises:
        Error: A variable of the environment has a setting that does not exist or is not supported.

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
    """Deprecated; logs a warning, as in PopTorch."""
    TensorLocations: _TensorLocationOptions
    """Where a real machine keeps tensors; estimates use it, and no value depends on it."""
    Distributed: _DistributedOptions
    """The ID of this process and the number of processes, which divide the data."""

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
            device_iterations: The number of repetitions; 1 by default.

        Returns:
            The options.

        Raises:
            UsageAssertionError: The argument is not an int.
        """
        return self.set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Set how many copies of the model share the data.

        Each copy runs micro-batches of its own, and all train the same weights: gradients are added
        up over the copies before the update, and averaged where those of micro-batches are. A call
        takes as many times more data, and returns an entry for each copy. Copies run at the same
        time if there are threads for them.

        Args:
            replication_factor: The number of copies; 1 by default.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not an int.
        """
        return self.set(replication_factor=replication_factor)

    def inputReplicaGrouping(
        self, input_group_size: int, input_group_type: CommGroupType = CommGroupType.Consecutive
    ) -> Self:
        """Give the replicas of one group the same input; call it after ``replicationFactor``.

        Replicas of a group still differ in their random numbers, and in weights that have groups of
        their own. It has no effect on one replica.

        Args:
            input_group_size: The number of replicas per group; 1 by default.
            input_group_type: How replicas are grouped. ``NoGrouping`` means groups of one replica.

        Returns:
            The options.

        Raises:
            UsageAssertionError: An argument has the wrong type.
            UsageValueError: The type is ``All``, or the size does not divide the number of
                replicas.
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

        The running statistics of batch norm are exempt: each replica keeps its own. It has no
        effect on one replica, or if all replicas have the same input.

        Args:
            broadcast_buffers: True, the default, refuses models that change a buffer on several
                replicas; False gives every replica its own copy, and the host gets that of the
                first replica.

        Returns:
            The options.

        Raises:
            UsageAssertionError: The argument is not a bool.
        """
        return self.set(broadcast_buffers=broadcast_buffers)

    def randomSeed(self, random_seed: int) -> Self:
        """Set the seed of the device's random numbers, and call ``torch.manual_seed`` with it.

        Args:
            random_seed: The seed, from -2**63 to 2**64 - 1; a negative one means the seed plus
                2**64. Without this call the device's seed is unspecified, and
                ``exists("random_seed")`` is False.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not an int.
            UsageValueError: The seed is out of range.
        """
        if isinstance(random_seed, int) and not -(2**63) <= random_seed < 2**64:
            raise UsageValueError(
                f"Options.randomSeed({random_seed}): the seed must be from -2**63 to 2**64 - 1."
            )
        self.createOrSet(random_seed=random_seed)
        torch.manual_seed(self.random_seed)
        return self

    def enableStableNorm(self, enabled: bool) -> Self:
        """Compute the variances of norm layers more accurately, as popsim_torch always does.

        It has **no effect**, on values or speed. Batch, group, instance and layer norm compute the
        mean first and the variance from the differences to it, in float32 also for float16; never
        as the difference of two large numbers, ``mean(x^2) - mean(x)^2``.

        Args:
            enabled: Whether to do so.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        require_bool("Options.enableStableNorm", enabled)
        self._Popart.set("enableStableNorm", enabled)
        return self

    def enableSyntheticData(self, enabled: bool) -> Self:
        """Run on random data that the device makes; the returned values have no meaning.

        The model is called as usual. Only the shapes and dtypes of the given tensors are used, not
        their values. Floating-point inputs hold random numbers of the normal distribution with mean
        0 and deviation 1, which depend on ``randomSeed`` and are new in every micro-batch. Integers
        are 0 and booleans False, which are valid labels and indices. Whether probabilities are
        between 0 and 1 is not checked, nor what ``torch._assert_async`` checks. Outputs have their
        usual shapes and dtypes, and hold the values that the model computes from these inputs;
        training updates the weights accordingly. If forward changes an input in place, the tensor
        on the host does not change.

        Args:
            enabled: Whether to do so; False by default.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        require_bool("Options.enableSyntheticData", enabled)
        self._Popart.set("syntheticDataMode", _NORMAL_DATA if enabled else 0)
        return self

    def updatableNamedBuffers(self, buffers: list[str]) -> Self:
        """List the buffers that ``copyNamedBuffersToDevice`` uploads.

        Args:
            buffers: Names of buffers of the model.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a list of strings.
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
        ``options``. Blank lines and lines that begin with ``#`` are skipped. The file can run any
        Python code: load only files that you trust.

        Args:
            filepath: The file, UTF-8 text.

        Returns:
            The options.

        Raises:
            ConfigFileError: A line is not Python; the message has the line number, counted without
                skipped lines. In this case no line of the file has run.
            OSError: The file cannot be read.
            Exception: The exception of a line.
        """
        text.apply_file(self, filepath)
        return self

    def from_json(self, string: str) -> Self:
        """Apply the settings of a JSON object.

        Args:
            string: An object with a setter per key, such as ``{"Training.gradientAccumulation":
                8}``. A list passes several arguments; a string such as ``"OutputMode.All"`` passes
                the member of the enum, if it exists.

        Returns:
            The options.

        Raises:
            UsageValueError: The string is not a JSON object.
            UsageAttributeError: A setter does not exist.
            Exception: The exception of a setter.
        """
        text.apply_json(self, string)
        return self

    def clone(self) -> Self:
        """Return an independent copy, including the groups, that is not frozen."""
        return self.__copy__()

    def toDict(self) -> dict[str, Any]:
        """Return the settings of the strategy, ``_Popart``, the options and the groups in one dict.

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
        """Return the values that are not the defaults, including groups, as strings by path."""
        found = super()._figures()
        strategy = self._settings()["execution_strategy"].default
        if repr(self.execution_strategy) != repr(strategy):
            found["execution_strategy"] = repr(self.execution_strategy)
        for name, part in self._parts().items():
            found |= {f"{name}.{key}": value for key, value in part._figures().items()}
        return found
