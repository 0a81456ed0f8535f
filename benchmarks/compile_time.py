"""How much time and memory does compiling take as graphs grow?

The cases are training steps: of chains of small linear layers and ReLUs, so that only the number
of ops matters, and of some of the benchmarks' models. Each is measured in a fresh process
that has compiled a tiny model before. For this package, the time is from the call to the first
result; the parts for tracing, lowering (with the passes) and building the executable are shown
separately. For torch.compile, without its caches on disk, the time is from the call to the end of
the first backward, for chains up to ``--compile-limit`` ops. The memory is the increase of the
process's peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import nn

from benchmarks.common.cases import Case, WithLoss, find_case
from benchmarks.common.contenders import make_training_model
from benchmarks.common.fresh import FreshProcess, current_bytes, peak_bytes, reset_peak
from benchmarks.common.report import Table, describe_machine, make_parser
from popsim_torch.executor import compile as compilation

WIDTH = 8
# Ops of a training step per layer: product and ReLU, their gradients, the updates.
OPS_PER_LAYER = 8
TINY = Case("tiny", lambda: nn.Linear(1, 10), 2, (1,))
SIZES = (10, 100, 1000, 10_000)
MODELS = ("MLP 32", "transformer 8")
TIMEOUT = 90.0
STEPS = {"trace": "trace", "lower": "lower", "build_executable": "build"}
MEBI = 1 << 20


def chain(num_ops: int) -> Case:
    """Return a case whose training step has about this number of ops."""
    layers = max(1, num_ops // OPS_PER_LAYER)

    def make_body() -> nn.Module:
        return nn.Sequential(
            *(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())),
            nn.Linear(WIDTH, 10),
        )

    return Case(f"{num_ops} ops", make_body, 4, (WIDTH,))


def _timed(function: Callable[..., Any], step: str, seconds: dict[str, float]) -> Any:
    """Return a function that does the same and adds its time to the time of a step."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[step] += time.perf_counter() - start

    return call


def _case(name: str | int) -> Case:
    return chain(name) if isinstance(name, int) else find_case(name)


def compile_ours(name: str | int) -> dict[str, float]:
    """Compile a model or a chain; return seconds, bytes, and the number of ops."""
    make_training_model(TINY)(*TINY.make_batches(1))
    case = _case(name)
    batches = case.make_batches(1)
    model = make_training_model(case)
    seconds = dict.fromkeys(STEPS.values(), 0.0)
    for function, step in STEPS.items():
        setattr(compilation, function, _timed(getattr(compilation, function), step, seconds))
    reset_peak()
    before = current_bytes()
    start = time.perf_counter()
    model(*batches)
    total = time.perf_counter() - start
    num_ops = len(model.compiled.host_program.graph.ops)
    return seconds | {"total": total, "peak": peak_bytes() - before, "ops": num_ops}


def compile_theirs(name: str | int) -> dict[str, float]:
    """Compile a model or a chain with torch.compile; return seconds and bytes."""
    torch._inductor.config.force_disable_caches = True
    torch.compile(WithLoss(TINY.make_body_in_dtype()))(*TINY.make_batches(1))[1].backward()
    case = _case(name)
    batches = case.make_batches(1)
    module = torch.compile(WithLoss(case.make_body_in_dtype()))
    reset_peak()
    before = current_bytes()
    start = time.perf_counter()
    module(*batches)[1].backward()
    return {"total": time.perf_counter() - start, "peak": peak_bytes() - before}


def main() -> None:
    """Print the table."""
    processes = FreshProcess(
        "benchmarks.compile_time", {"ours": compile_ours, "theirs": compile_theirs}, TIMEOUT
    )
    if processes.serve():
        return
    parser = make_parser(__doc__, rounds=1)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES, help="ops of the chains")
    parser.add_argument("--models", nargs="*", default=MODELS, help="names of cases")
    parser.add_argument("--compile-limit", type=int, default=300, help="0: no torch.compile")
    arguments = parser.parse_args()
    print(describe_machine())
    table = Table(
        "Compiling a training step",
        [
            "model",
            "ops",
            *(f"{step}, s" for step in STEPS.values()),
            "in all, s",
            "ms per op",
            "peak, MiB",
            "torch.compile, s",
            "its peak, MiB",
        ],
        "Targets: MLP below 1 s, transformer below 4 s. "
        f"A dash: not tried, or over {TIMEOUT:.0f} s.",
    )
    for name in (*arguments.sizes, *arguments.models):
        runs = [processes.call("ours", name) for _ in range(arguments.rounds)]
        ours = min(runs, key=lambda run: run["total"])
        tried = isinstance(name, str) or name <= arguments.compile_limit
        theirs = processes.call("theirs", name) if tried and arguments.compile_limit else None
        table.row(
            name if isinstance(name, str) else f"chain of {name}",
            str(ours["ops"]),
            *(ours[step] for step in STEPS.values()),
            ours["total"],
            1e3 * ours["total"] / ours["ops"],
            ours["peak"] / MEBI,
            *(("-", "-") if theirs is None else (theirs["total"], theirs["peak"] / MEBI)),
        )


if __name__ == "__main__":
    main()
