"""``profile.pop``: the report of a compiled model that ``Options.enableProfiling`` asks for.

It is a JSON object with the compiled model, the number of runs, the time of the last call, the
bytes that the program needs, and its ops in the order of execution, each with its stage, the line
of code it comes from and the tensors that it writes. Tools for real IPU reports cannot read it.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from popsim_torch import environment, logs
from popsim_torch.errors import closest_names
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.ir import Graph, Op, Program
from popsim_torch.options import Options
from popsim_torch.version import __version__

__all__ = ["promise_report"]

_REPORTS = ("autoReport.all", "autoReport.outputGraphProfile", "autoReport.outputExecutionProfile")
"""Engine options that ask for a report."""
_ACTING = (*_REPORTS, "autoReport.directory", "debug.allowOutOfMemory")
"""Engine options that take effect, and one that ``Options.enableProfiling`` sets."""
_KNOWN = (
    *_ACTING,
    "autoReport.executionProfileProgramRunCount",
    "autoReport.outputArchive",
    "autoReport.outputDebugInfo",
    "autoReport.outputLoweredVars",
    "autoReport.outputSerializedGraph",
    "autoReport.streamAtEachRun",
)
_taken: set[Path] = set()
"""The folders of the reports that this process has written or will write."""


def promise_report(
    executor: object, compiled: CompiledModel, options: Options
) -> weakref.finalize[Any, Any] | None:
    """Arrange that a report is written when the executor is deleted, or at exit.

    Args:
        executor: The executor; this function does not keep it alive.
        compiled: The compiled model of the executor.
        options: The options of the executor; they have the folder of the reports.

    Returns:
        An object that writes the report once, when it is called; None if no report is wanted.
    """
    target = _target(options, training=compiled.plan is not None)
    return None if target is None else weakref.finalize(executor, _write, target, compiled)


def _target(options: Options, *, training: bool) -> Path | None:
    """Return the folder of the report; None if no report is wanted."""
    settings = {
        **environment.json_object("POPLAR_ENGINE_OPTIONS"),
        **options._Popart.options.get("engineOptions", {}),
    }
    _tell_ineffective(settings)
    if not any(str(settings.get(name)).lower() == "true" for name in _REPORTS):
        return None
    name = options.model_name if options.exists("model_name") else None
    directory = Path(str(settings.get("autoReport.directory", ".")))
    # An absolute path: a program may change its working directory.
    return _free(directory.absolute() / (name or ("training" if training else "inference")))


def _free(directory: Path) -> Path:
    """Return a folder for a report: each program of a process has its own."""
    names = itertools.chain([""], (f"_{number}" for number in itertools.count(2)))
    found = (directory.with_name(directory.name + name) / "profile.pop" for name in names)
    target = next(one for one in found if one not in _taken)
    _taken.add(target)
    return target


def _tell_ineffective(settings: Mapping[str, object]) -> None:
    """Warn of engine options that ask for something and have no effect; once for each option."""
    for name, value in settings.items():
        if name in _ACTING or str(value).lower() == "false":
            continue
        if name in _KNOWN or not name.lower().startswith("autoreport."):
            logs.warn_once("The engine option '%s' has no effect.", name)
            continue
        near = closest_names(name, _KNOWN, 1)
        logs.warn_once(
            "There is no engine option '%s'; it has no effect.%s",
            name,
            f" The nearest one is '{near[0]}'." if near else "",
        )


def _write(target: Path, compiled: CompiledModel) -> None:
    """Write the report of a model; a failure to write is only a warning."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(_report(target, compiled), indent=1) + "\n")
    except OSError as error:
        logs.python.warning("Options.enableProfiling: the report cannot be written: %s", error)


def _report(target: Path, compiled: CompiledModel) -> dict[str, Any]:
    executable, run = compiled.executable, compiled.run
    num_runs = executable.num_runs
    _, begin, end = executable.last_run if num_runs else (0.0, 0.0, 0.0)
    plan = executable.plan
    return {
        "format": "popsim_torch report 1",
        "popsim_torch": __version__,
        "model": target.parent.name,
        "training": compiled.plan is not None,
        "num_ipus": run.num_ipus,
        "compilation_seconds": compiled.duration.total_seconds(),
        "device_iterations": run.loop.device_iterations,
        "gradient_accumulation": run.loop.gradient_accumulation,
        "calls": num_runs,
        "last_call_seconds": end - begin,
        "memory": {
            "weights_and_states_bytes": plan.persistent_bytes,
            "activations_bytes": plan.arena_bytes,
            "activations_in_use_bytes": plan.peak_live_bytes,
        },
        "ops": _ops(compiled.host_program),
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
        ],
    }
