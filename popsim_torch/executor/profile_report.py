"""The report of a compiled model that ``Options.enableProfiling`` asks for."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from popsim_torch import environment
from popsim_torch.errors import Error
from popsim_torch.executor.compile import CompiledModel
from popsim_torch.options import Options
from popsim_torch.version import __version__

__all__ = ["write_report"]

_VARIABLE = "POPLAR_ENGINE_OPTIONS"
_REPORTS = ("autoReport.all", "autoReport.outputGraphProfile", "autoReport.outputExecutionProfile")
"""The engine options that ask for a report, with the text ``true``."""


def write_report(compiled: CompiledModel, options: Options) -> None:
    """Write ``<directory>/<model name>/profile.pop``, if the options or the environment ask for it.

    It is JSON: what the program consists of, nothing of time. PopVision does not read it.

    Args:
        compiled: The model.
        options: Of the model. Its engine options go before those of ``POPLAR_ENGINE_OPTIONS``.

    Raises:
        Error: The file cannot be written.
    """
    engine = {
        **environment.json_object(_VARIABLE),
        **options._Popart.options.get("engineOptions", {}),
    }
    if not any(str(engine.get(name)).lower() == "true" for name in _REPORTS):
        return
    training = compiled.plan is not None
    name = options.model_name if options.exists("model_name") else _default_name(training)
    path = Path(str(engine.get("autoReport.directory", "."))) / name / "profile.pop"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_content(compiled, name), indent=2), encoding="utf-8")
    except OSError as error:
        raise Error(
            f"The profile report {path} cannot be written ({error}). Pass a folder that can be to "
            f"Options.enableProfiling, or name one as autoReport.directory in {_VARIABLE}."
        ) from error


def _default_name(training: bool) -> str:
    return "training" if training else "inference"


def _content(compiled: CompiledModel, name: str) -> Mapping[str, Any]:
    graph, run = compiled.host_program.graph, compiled.run
    return {
        "writer": f"popsim_torch {__version__}",
        "model": name,
        "kind": _default_name(compiled.plan is not None),
        "num_ipus": run.num_ipus,
        "schedule": run.schedule,
        "device_iterations": run.loop.device_iterations,
        "gradient_accumulation": run.loop.gradient_accumulation,
        "compilation_seconds": compiled.duration.total_seconds(),
        "num_tensors": len(graph.tensors),
        "ops": dict(sorted(Counter(op.kind for op in graph.ops).items())),
    }
