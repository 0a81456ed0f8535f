"""The settings of ``Options`` that do not change computed values. Package private.

They choose where a model runs, and what is reported, logged and stored for its runs.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

from popsim_torch.enums import ConnectionType, PipelineSchedule, SyncPattern
from popsim_torch.errors import UsageAssertionError
from popsim_torch.options.base import OptionsGroup, Setting, require, require_bool, require_enum
from popsim_torch.stages import ExecutionStrategy, PipelinedExecution

if TYPE_CHECKING:
    from typing_extensions import Self

    from popsim_torch.options.popart import _PopartOptions

_logger = logging.getLogger("poptorch::python")

_UNLIMITED = 2**64 - 1


class HostOptions(OptionsGroup):
    """Settings for where a model runs, and what is reported, logged and stored for its runs."""

    _Popart: _PopartOptions

    execution_strategy = Setting[ExecutionStrategy](
        PipelinedExecution(), kind=ExecutionStrategy, setter="setExecutionStrategy", is_key=False
    )
    pipeline_schedule = Setting(
        int(PipelineSchedule.Default),
        enum=PipelineSchedule,
        setter="pipelineSchedule",
        is_key=False,
    )
    auto_round_num_ipus = Setting(False, setter="autoRoundNumIPUs")
    available_memory_proportion = Setting[dict[int, float]](
        {}, setter="setAvailableMemoryProportion"
    )
    connection_type = Setting(
        int(ConnectionType.Always), enum=ConnectionType, setter="connectionType"
    )
    sync_pattern = Setting(int(SyncPattern.Full), enum=SyncPattern, setter="syncPattern")
    use_model = Setting.absent(bool, "useIpuModel")
    ipu_id = Setting.absent(int, "useIpuId")
    ipu_version = Setting.absent(int, "useOfflineIpuTarget")
    model_name = Setting.absent(str, "modelName")
    log_dir = Setting(".", setter="logDir")
    max_repeat_logs = Setting(4, setter="maxRepeatLogs")
    show_compilation_progress_bar = Setting(True, setter="showCompilationProgressBar", is_key=False)
    progress_bar_asked_for = Setting(False, is_key=False)
    source_location_excludes = Setting(
        ["lib/python", "site-packages", "popsim_torch/trace"],
        setter="sourceLocationExcludes",
        is_key=False,
    )
    relax_optimizer_checks = Setting(False, setter="relaxOptimizerAttributesChecks", is_key=False)
    module_namescope_enabled = Setting(True, setter="disableModuleNamescope", is_key=False)

    def setExecutionStrategy(self, strategy: ExecutionStrategy) -> Self:
        """Choose how the blocks of a model form stages, and when the stages run; no value changes.

        Args:
            strategy: A ``PipelinedExecution`` (the default, with ``AutoStage.SameAsIpu``), a
                ``ShardedExecution``, a ``SerialPhasedExecution`` or a ``ParallelPhasedExecution``.

        Returns:
            The options.

        Raises:
            UsageAssertionError: The argument is something else.
        """
        return self.set(execution_strategy=strategy)

    def pipelineSchedule(self, schedule: PipelineSchedule) -> Self:
        """Choose when the stages of a pipeline run; no value changes.

        With a schedule other than ``Default``, the number of micro-batches must be a multiple of
        the number in flight. For ``n`` stages the latter is ``2 n`` (``Grouped``), ``n``
        (``Interleaved``) or 1 (``Sequential``) in training, and ``n``, ``n`` or 1 in inference. It
        is checked when the model is compiled.

        Args:
            schedule: A ``PipelineSchedule``; ``Default`` is PopTorch's own.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a ``PipelineSchedule``.
        """
        require_enum("Options.pipelineSchedule", schedule, PipelineSchedule)
        return self.set(pipeline_schedule=schedule)

    def autoRoundNumIPUs(self, auto_round_num_ipus: bool = True) -> Self:
        """Reserve more IPUs, with a warning, if a model uses a number that is not a power of two.

        Args:
            auto_round_num_ipus: Whether to do so. If False, the default, such a model is an error.

        Returns:
            The options.

        Raises:
            UsageAssertionError: The argument is not a bool.
        """
        return self.set(auto_round_num_ipus=auto_round_num_ipus)

    def setAvailableMemoryProportion(self, available_memory_proportion: dict[str, float]) -> None:
        """Give a hint how much of an IPU's memory convolutions and matrix products may use.

        It has no effect on values. Estimates divide convolutions and products so that what they
        need for themselves on a tile stays below this share (0.6 without a hint): a smaller share
        takes less memory and more cycles. If nothing fits, the share is doubled.

        Args:
            available_memory_proportion: A share of the memory (1.0 is all of it) by IPU, for
                example ``{"IPU0": 0.3}``. The share is not checked.

        Raises:
            UsageAssertionError: The argument is not a dict, or a key is not ``IPU`` and a number.
        """
        call = f"Options.setAvailableMemoryProportion({available_memory_proportion!r})"
        require(isinstance(available_memory_proportion, dict), f"{call}: pass a dict.")
        shares = {}
        for key, share in available_memory_proportion.items():
            match = re.fullmatch(r"IPU(\d+)", key) if isinstance(key, str) else None
            if match is None:
                raise UsageAssertionError(f"{call}: the key {key!r} must be like 'IPU0'.")
            shares[int(match[1])] = share
        self.set(available_memory_proportion=shares)

    def connectionType(self, connection_type: ConnectionType) -> Self:
        """Choose when a model attaches to its device.

        Args:
            connection_type: ``ConnectionType.Always``, the default, attaches the model before it is
                compiled, and ``OnDemand`` after that. With ``Never`` the model can only be compiled
                and saved.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a ``ConnectionType``.
        """
        require_enum("Options.connectionType", connection_type, ConnectionType)
        return self.set(connection_type=connection_type)

    def useOfflineIpuTarget(self, ipu_version: int = 2) -> Self:
        """Compile for a machine that is not available, as with ``ConnectionType.Never``.

        Estimates are for this machine, unless ``machine`` names another one.

        Args:
            ipu_version: The generation of the machine: 1, 2 or 21.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: ``ipu_version`` is none of these.
        """
        require(
            isinstance(ipu_version, int) and ipu_version in (1, 2, 21),
            f"Options.useOfflineIpuTarget({ipu_version!r}): use 1, 2 or 21.",
        )
        return self.createOrSet(connection_type=ConnectionType.Never, ipu_version=ipu_version)

    def useIpuModel(self, use_model: bool) -> Self:
        """Choose between hardware and a software model of it.

        Both choices run the simulated machine. The only effect is a log line when a model is
        compiled: cycles are counted, and estimates are made, with either.

        Args:
            use_model: Whether to use the software model.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        return self.createOrSet(use_model=use_model)

    def useIpuId(self, ipu_id: int) -> Self:
        """Choose a device by its number; no effect on values, because all devices are the same.

        Args:
            ipu_id: The number.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not an int.
        """
        return self.createOrSet(ipu_id=ipu_id)

    def syncPattern(self, sync_pattern: SyncPattern) -> Self:
        """Choose which IPUs wait for each other.

        It has no effect: estimates assume that all tiles of an IPU wait for each other at each
        step, and IPUs only where they exchange data.

        Args:
            sync_pattern: The pattern; ``SyncPattern.Full`` by default.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a ``SyncPattern``.
        """
        require_enum("Options.syncPattern", sync_pattern, SyncPattern)
        return self.set(sync_pattern=sync_pattern)

    def enableExecutableCaching(self, path: str | os.PathLike[str] | None) -> Self:
        """Save compiled programs in a directory, and load them from there; no value changes.

        There is one file for each program. The model is still traced every time, because only the
        trace shows whether ``forward`` has changed; the cache saves the steps after the trace.
        Several processes may share the directory.

        Args:
            path: The directory, which is created when it is needed; None turns caching off.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a path.
        """
        self.checkIsFrozen()
        if path is not None:
            self._Popart.set("cachePath", _as_path("enableExecutableCaching", path))
        self._Popart.set("enableEngineCaching", path is not None)
        return self

    def enableProfiling(self, profile_dir: str | os.PathLike[str] | None = None) -> Self:
        """Write a report of every program: what it would cost on an IPU; no value changes.

        The report is written to ``<profile_dir>/<model name>`` when the executor is destroyed or
        dropped, or when the program ends. A model without a name is called ``training`` or
        ``inference``; a loop of a function, or ``fit``,
        ``popsim_report__<date>__<time>__<pid>``. If several programs of a process have the same
        name, the second writes to ``<model name>_2``, and so on. Its files are ``profile.pop``
        (JSON, for ``popsim_torch.report.open``), ``report.html``, ``trace.json`` (for Perfetto),
        ``debug.json`` and ``framework.json``. Cycles and memory of an IPU are simulated; the first
        two calls are also measured on this computer. PopVision cannot read these reports.

        This sets the engine options ``autoReport.all``, ``autoReport.directory`` and
        ``debug.allowOutOfMemory``. Others choose single outputs and the number of recorded calls;
        see the page "What it would cost on an IPU". Engine options in the variable
        ``POPLAR_ENGINE_OPTIONS`` win over those of this method, with a warning.

        Args:
            profile_dir: The directory to write to, ``"."`` if None; it is created if it does not
                exist.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: ``profile_dir`` is not a path.
        """
        self.checkIsFrozen()
        directory = "." if profile_dir is None else _as_path("enableProfiling", profile_dir)
        configured = os.environ.get("POPLAR_ENGINE_OPTIONS", "")
        if "autoReport" in configured:
            _logger.warning(
                "Options.enableProfiling: the environment variable POPLAR_ENGINE_OPTIONS "
                "configures reports, too: %s. Remove these settings from the variable, or remove "
                "this call.",
                configured,
            )
        report = {
            "debug.allowOutOfMemory": "true",
            "autoReport.directory": directory,
            "autoReport.all": "true",
        }
        self._Popart.set(
            "engineOptions", {**self._Popart.options.get("engineOptions", {}), **report}
        )
        return self

    def modelName(self, name: str) -> Self:
        """Set the name of the model in reports.

        Args:
            name: The name; ``training`` or ``inference`` if none is set.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a string.
        """
        return self.createOrSet(model_name=name)

    def logCycleCount(self, log_cycle_count: bool) -> Self:
        """Count the cycles of every run, for ``cycleCount()`` and a log line; no value changes.

        The cycles are simulated: those of ``executor.estimate()``. Each run logs them in one line
        of the level DEBUG. They are computed once for a program, when they are first needed.

        Args:
            log_cycle_count: Whether to do so; False by default.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        require_bool("Options.logCycleCount", log_cycle_count)
        self._Popart.set("instrumentWithHardwareCycleCounter", log_cycle_count)
        return self

    def logDir(self, log_dir: str) -> Self:
        """Choose where the back end writes its logs; no effect, because this back end writes none.

        Args:
            log_dir: The directory; ``"."`` by default.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a string.
        """
        return self.set(log_dir=log_dir)

    def maxRepeatLogs(self, max_lines: int | None) -> Self:
        """Limit how often the same warning is repeated in the log; a line says when it is reached.

        Lines of other levels are always written. Each compilation starts the count again.

        Args:
            max_lines: The limit (count), 4 by default; None for no limit.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is neither an int nor None.
        """
        return self.set(max_repeat_logs=_UNLIMITED if max_lines is None else max_lines)

    def showCompilationProgressBar(self, show: bool = True) -> Self:
        """Show a progress bar on the standard error stream while a model is compiled.

        If this method is not called, the bar is shown only on a terminal. ``compilationTime()``
        needs it to be on.

        Args:
            show: Whether to show it; True by default.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        return self.set(show_compilation_progress_bar=show, progress_bar_asked_for=show)

    def sourceLocationExcludes(self, excludes: list[str]) -> Self:
        """Choose stack frames that are never named as the source of an operation.

        Args:
            excludes: Parts of paths; a frame whose path contains one is skipped, unless all frames
                do. They replace the default parts, which match Python's own and installed files.
                Frames of PyTorch and of this package are always skipped.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a list of strings.
        """
        require(
            isinstance(excludes, list) and all(isinstance(piece, str) for piece in excludes),
            f"Options.sourceLocationExcludes({excludes!r}): pass a list of strings.",
        )
        return self.set(source_location_excludes=list(excludes))

    def appendToLocationExcludes(self, *excludes: str) -> Self:
        """Add parts of paths to those of ``sourceLocationExcludes``.

        Args:
            *excludes: Parts of paths.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: An argument is not a string.
        """
        require(
            all(isinstance(piece, str) for piece in excludes),
            f"Options.appendToLocationExcludes{excludes!r}: pass strings.",
        )
        return self.set(source_location_excludes=[*self.source_location_excludes, *excludes])

    def relaxOptimizerAttributesChecks(self, relax: bool = True) -> Self:
        """Report unknown attributes of an optimizer at level DEBUG instead of WARNING.

        Args:
            relax: Whether to do so; without a call of this method the level is WARNING.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
            UsageAssertionError: The argument is not a bool.
        """
        return self.set(relax_optimizer_checks=relax)

    def disableModuleNamescope(self) -> Self:
        """Remove the path of the modules from the names of operations and tensors.

        Returns:
            The options.

        Raises:
            UsageAttributeError: The options are frozen.
        """
        return self.set(module_namescope_enabled=False)


def _as_path(setter: str, path: str | os.PathLike[str]) -> str:
    require(
        isinstance(path, (str, os.PathLike)), f"Options.{setter}({path!r}): pass a path or None."
    )
    return str(os.fspath(path))
