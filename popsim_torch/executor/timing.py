"""The times that an executor reports: of compilation, of calls, and of the simulated machine."""

from __future__ import annotations

import datetime
import logging

from popsim_torch import _native, logs
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.costs import compiled_estimate
from popsim_torch.executor.counters import (
    Latency,
    PerfCounters,
    RunShape,
    latency,
    perf_counters,
)
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.executor.interface import loop_counts
from popsim_torch.processes.traffic import Traffic

__all__ = ["Timing"]


class Timing:
    """The part of an executor that reports times.

    Args:
        device: The executor's program.
        training: Whether the executor trains.
    """

    def __init__(self, device: DeviceProgram, *, training: bool) -> None:
        self._device = device
        self._training = training
        # The program whose cycles are known, and the cycles.
        self._counted: tuple[CompiledModel, int] | None = None
        if self._counts_cycles:
            device.after_run = self._log_cycles

    def compilationTime(self) -> datetime.timedelta:
        """Return how long compilation took.

        Raises:
            Error: The model is not compiled, or the progress bar is off.
        """
        compiled = self._device.compiled
        if compiled is None:
            raise Error(
                "compilationTime: compile the model first, with a call or with model.compile(...)."
            )
        if not self._device.options.show_compilation_progress_bar:
            raise Error(
                "compilationTime: not measured while the progress bar is off. Remove "
                "Options.showCompilationProgressBar(False)."
            )
        return compiled.duration

    def traffic(self) -> Traffic:
        """Return what has been exchanged with the other processes that train the model.

        A model that one process trains exchanges nothing.
        """
        return self._device.traffic

    def cycleCount(self) -> int:
        """Return how many cycles of the IPU's clock the last call would take, simulated.

        The number is that of ``estimate().cycles`` for the first replica, with the data of the
        host: it depends on the program and the machine (``Options.machine``), not on this computer
        and not on values. ``getLatency`` has the time that calls take here.

        Raises:
            Error: ``Options.logCycleCount`` is off, or the model has not run.
        """
        if not self._counts_cycles:
            raise Error(
                "cycleCount: cycles are not counted. Call Options.logCycleCount(True) before the "
                "model is wrapped."
            )
        if self._device.compiled is None or self._device.last_complete_run == 0:
            raise Error("cycleCount: run the model at least once before asking for its cycles.")
        return self._cycles(self._device.compiled)

    @property
    def _counts_cycles(self) -> bool:
        return bool(
            self._device.options._Popart.options.get("instrumentWithHardwareCycleCounter", False)
        )

    def _cycles(self, compiled: CompiledModel) -> int:
        if self._counted is None or self._counted[0] is not compiled:
            estimate = compiled_estimate(compiled, self._device.options)
            self._counted = compiled, round(estimate.cycles)
        return self._counted[1]

    def _log_cycles(self, compiled: CompiledModel) -> None:
        if logs.python.isEnabledFor(logging.DEBUG):
            logs.python.debug("Total number of IPU cycles: %d", self._cycles(compiled))

    def getPerfCounters(self) -> PerfCounters:
        """Return when the last complete call read its inputs and wrote its outputs.

        Only the beginning and the end of the run are measured, and the time before the run in which
        the device checks its inputs. In between, the micro-batches are assumed to follow each other
        at a constant rate: each is read at the beginning of its share of the time, and written at
        the end. Outputs are complete when they are requested, as the device writes them in place.

        Returns:
            ``input``, ``input_complete``, ``output`` and ``output_complete``: a list for each
            flattened tensor of the arguments or of the result. The list has a time in seconds for
            each micro-batch that is read (deviceIterations x gradientAccumulation x
            replicationFactor) or that the output mode returns. Only differences between times have
            a meaning.

        Raises:
            Error: Another thread is in a call.
        """
        compiled = self._device.compiled
        if compiled is None:
            return {key: [[]] for key in ("input", "input_complete", "output", "output_complete")}
        run, options = None, self._device.options
        if self._device.last_complete_run and not options._Popart.options.get("syntheticDataMode"):
            with _native.translated_errors():
                run = compiled.executable.last_run
        shape = RunShape(
            loop=loop_counts(options, training=self._training),
            replicas=options.replication_factor,
            mode=OutputMode(options.output_mode),
            period=options.output_return_period,
            num_inputs=len(compiled.arguments.names),
            num_outputs=len(compiled.program.outputs),
        )
        return perf_counters(shape, run)

    def getLatency(self) -> Latency:
        """Return the time from the first input to the last output of a micro-batch.

        Returns:
            The minimum, the maximum and the mean time, in seconds; zeros before the first call.
        """
        return latency(self.getPerfCounters(), "input", "output_complete")

    def getHostIpuLatency(self) -> Latency:
        """Return the transfer time of inputs to the device, in the form of ``getLatency``.

        It is a micro-batch's share of the time in which the device checks its inputs, before it
        reads them in place.
        """
        return latency(self.getPerfCounters(), "input", "input_complete")

    def getComputeLatency(self) -> Latency:
        """Return the time from the last input to the last output, in the form of ``getLatency``.

        As outputs take no time, this is the time of ``getLatency`` without the transfer time of
        inputs.
        """
        return latency(self.getPerfCounters(), "input_complete", "output")

    def getIpuHostLatency(self) -> Latency:
        """Return the transfer time of outputs to the host, in the form of ``getLatency``.

        The time is zero: the simulated device writes the outputs directly into host memory.
        """
        return latency(self.getPerfCounters(), "output", "output_complete")
