"""Collects what a compiled model's report says, which ``Options.enableProfiling`` asks for.

The first calls are recorded, and the report is written when the executor goes. What it looks like
is the matter of ``popsim_torch.report``.
"""

from __future__ import annotations

import os
import weakref
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from popsim_torch import _native, environment, host_trace, logs
from popsim_torch.errors import Error
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.costs import compiled_estimate
from popsim_torch.executor.timeline import read_timeline
from popsim_torch.ir import Graph, Op, Program, RunSettings
from popsim_torch.machine import Estimate
from popsim_torch.options import Options
from popsim_torch.report.folder import choose_folder, write_folder
from popsim_torch.report.schema import FORMAT
from popsim_torch.report.settings import Outputs, read_settings
from popsim_torch.report.validated import read_validation
from popsim_torch.version import __version__

if TYPE_CHECKING:
    from popsim_torch.executor.device_program import DeviceProgram

__all__ = ["PromisedReport", "report_refused", "wanted_outputs"]

_MOST_LANES = 20_000
"""Actions of a call that a report lists."""
_SIMULATED = (
    "Every figure in 'estimate', and 'simulated' in 'runs', is simulated: it is what a model of "
    "the machine gives. 'measured' in 'runs' are seconds on this computer."
)


def wanted_outputs(options: Options) -> Outputs | None:
    """Return what the engine options ask for; None if they ask for no report.

    Those of the environment win over those of the options.

    Raises:
        UsageValueError: An engine option has a value that it cannot have.
    """
    return read_settings(
        {
            **options._Popart.options.get("engineOptions", {}),
            **environment.json_object("POPLAR_ENGINE_OPTIONS"),
        }
    )


class PromisedReport:
    """A report that is written when the owner of a program is deleted, or at exit.

    Until then it records calls, as many as are wanted.

    Args:
        device: The program with its options; the report does not keep it alive.
        compiled: The compiled model.
        outputs: What the report has.
    """

    def __init__(self, device: DeviceProgram, compiled: CompiledModel, outputs: Outputs) -> None:
        options = device.options
        folder = choose_folder(
            outputs.directory,
            options.model_name if options.exists("model_name") else None,
            training=compiled.plan is not None,
            loop=device.is_loop,
            process=compiled.run.process,
        )
        self._content = content = _Content(folder, outputs, compiled, options)
        self._write = weakref.finalize(device, content.write)
        self._device = weakref.ref(device)
        self._judge = device.judge
        self._is_recording = outputs.execution and outputs.runs > 0
        if self._is_recording:
            # A hook of the first calls only: later ones, and those without a report, cost nothing.
            device.judge = self._note_run
            content.lanes = content.num_actions <= _MOST_LANES
            if content.lanes:
                with _native.translated_errors():
                    compiled.executable.record(True)

    def write(self) -> None:
        """Write the report now, without what happens later."""
        self._stop()
        self._write()

    def _note_run(self) -> None:
        """Record the call that has ended, then do what is done after every call."""
        content = self._content
        content.note_run()
        if len(content.runs) >= content.outputs.runs:
            self._stop()
        if self._judge is not None:
            self._judge()

    def _stop(self) -> None:
        """Record no more calls."""
        device, content = self._device(), self._content
        if device is None or not self._is_recording:
            return
        self._is_recording = False
        device.judge = self._judge
        if content.lanes and not device.keeps_timeline:
            with _native.translated_errors():
                content.compiled.executable.record(False)


class _Content:
    """What the report says; it does not keep the owner of the program alive.

    Args:
        folder: The folder of the report.
        outputs: What the report has.
        compiled: The compiled model.
        options: The options.
    """

    def __init__(
        self, folder: Path, outputs: Outputs, compiled: CompiledModel, options: Options
    ) -> None:
        self.folder, self.outputs, self.compiled = folder, outputs, compiled
        self.runs: list[dict[str, Any]] = []
        self.lanes = False
        self._options = options
        self._created = datetime.now()
        self._pid = os.getpid()

    @property
    def num_actions(self) -> int:
        """The number of actions of stages in a call."""
        loop = self.compiled.run.loop
        stages = len(self.compiled.executable.plan.lane_of_stage)
        passes = 2 if self.compiled.plan is not None else 1
        micro_batches = loop.device_iterations * loop.gradient_accumulation * loop.replicas
        return micro_batches * stages * passes + loop.device_iterations

    def note_run(self) -> None:
        """Keep when the last call began and ended, and what its threads did."""
        executable = self.compiled.executable
        _, begin, end = executable.last_run
        recorded = executable.timeline() if self.lanes else None
        lanes = [] if recorded is None else read_timeline(self.compiled, recorded)
        names = ("kind", "stage", "micro_batch", "device_iteration", "replica", "thread")
        self.runs.append(
            {
                "number": executable.num_runs - 1,
                "measured": {
                    "begin": begin,
                    "end": end,
                    "lanes": [
                        {
                            **{name: getattr(one, name) for name in names},
                            "begin": round(one.begin, 9),
                            "end": round(one.end, 9),
                        }
                        for one in lanes
                    ],
                    "lanes_left_out": 0 if self.lanes else self.num_actions,
                },
            }
        )

    def write(self) -> None:
        """Write the report; a failure to write is only a warning."""
        if os.getpid() == self._pid:  # not a forked process that ends
            _write(self.folder, self.outputs, self._report())

    def _report(self) -> dict[str, Any]:
        compiled = self.compiled
        estimate, problem = self._estimate()
        cycles = None if estimate is None else {"cycles": estimate.cycles}
        plan = compiled.executable.plan
        return {
            **_head(self.folder.name, self._created),
            "calls": compiled.executable.num_runs,
            "static": {
                **_static(compiled.run, self._options, training=compiled.plan is not None),
                "compilation_seconds": compiled.duration.total_seconds(),
                "host_memory": {
                    "weights_and_states_bytes": plan.persistent_bytes,
                    "activations_bytes": plan.arena_bytes,
                    "activations_in_use_bytes": plan.peak_live_bytes,
                },
                "host_ops": _ops(compiled.host_program),
            },
            "no_estimate": problem,
            "runs": [{**run, "simulated": cycles} for run in self.runs],
            "estimate": None if estimate is None else estimate.as_dict(),
        }

    def _estimate(self) -> tuple[Estimate | None, str | None]:
        """Return the estimate, or None and why there is none."""
        try:
            return compiled_estimate(self.compiled, self._options), None
        except Error as error:
            return None, error.message


def report_refused(
    program: Program, run: RunSettings, options: Options, estimate: Estimate, *, training: bool
) -> Path | None:
    """Write the report of a program that is refused because it does not fit, and never runs.

    Args:
        program: The program that is the same on every machine.
        run: The settings of its runs.
        options: The options.
        estimate: The estimate.
        training: Whether it trains.

    Returns:
        The folder of the report; None if the options ask for none, or it cannot be written.
    """
    outputs = wanted_outputs(options)
    if outputs is None:
        return None
    name = options.model_name if options.exists("model_name") else None
    folder = choose_folder(
        outputs.directory, name, training=training, loop=False, process=run.process
    )
    report = {
        **_head(folder.name, datetime.now()),
        "calls": 0,
        "static": {
            **_static(run, options, training=training),
            "compilation_seconds": 0.0,
            "host_memory": {},
            "host_ops": _ops(program),
        },
        "no_estimate": None,
        "runs": [],
        "estimate": estimate.as_dict(),
    }
    return folder if _write(folder, outputs, report) else None


def _write(folder: Path, outputs: Outputs, report: dict[str, Any]) -> bool:
    """Write a report; return whether it could be written."""
    trace = host_trace.current()
    try:
        write_folder(folder, outputs, report, [] if trace is None else trace.events)
    except OSError as error:
        logs.python.warning("Options.enableProfiling: the report cannot be written: %s", error)
        return False
    return True


def _head(name: str, created: datetime) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "popsim_torch": __version__,
        "name": name,
        "created": created.isoformat(timespec="milliseconds"),
        "pid": os.getpid(),
        "simulated": _SIMULATED,
        "validation": read_validation(),
    }


def _static(run: RunSettings, options: Options, *, training: bool) -> dict[str, Any]:
    return {
        "training": training,
        "num_ipus": run.num_ipus,
        "device_iterations": run.loop.device_iterations,
        "gradient_accumulation": run.loop.gradient_accumulation,
        "options": {name: str(value) for name, value in options._figures().items()},
    }


def _ops(program: Program) -> list[dict[str, Any]]:
    graph = program.graph
    names = {tensor_id: name for name, tensor_id in graph.names.items()}
    return [_op(graph, names, op) for op in graph.ops]


def _op(graph: Graph, names: dict[int, str], op: Op) -> dict[str, Any]:
    return {
        "name": op.name,
        "kind": op.kind,
        "phase": op.phase.name.lower(),
        "stage": op.stage,
        "scope": op.origin.scope,
        "source": op.origin.source,
        "outputs": [
            {
                "name": names.get(tensor_id, ""),
                "dtype": str(graph.tensors[tensor_id].dtype).removeprefix("torch."),
                "shape": list(graph.tensors[tensor_id].shape),
            }
            for tensor_id in op.outputs
            if tensor_id >= 0
        ],
    }
