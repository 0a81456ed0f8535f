"""Does a model that users bring train as in eager PyTorch, and how fast?

Every model of ``benchmarks/zoo`` trains ten steps here, in eager PyTorch, and in eager PyTorch with
float64, which is what the other two are measured against. Then steps here and in eager PyTorch
alternate. Each model has a process of its own. ``--page FILE`` writes the page of the
documentation instead of tables.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.fresh import FreshProcess
from benchmarks.common.report import Table, describe_machine, make_parser, three_digits
from benchmarks.zoo.catalogue import ENTRIES, find
from benchmarks.zoo.entry import Entry
from benchmarks.zoo.trial import SLACK, try_out

SECONDS = 3.0
"""How long steps alternate, if this is more than the number of rounds."""
MAX_ROUNDS = 200
TURN_SECONDS = 0.03
"""How long a turn takes, of calls that are shorter; the first one of it does not count."""
COLUMNS = (
    "model",
    "data",
    "parameters",
    "steps",
    "ops",
    "compiles in, s",
    "eager, ms",
    "ours, ms",
    "eager/ours",
    "error of losses",
    "eager's",
    "error of weights",
    "eager's",
)

Row = dict[str, Any]


def measure(name: str, rounds: int, steps: int | None = None) -> Row:
    """Train a model in all ways and return the figures of its row.

    Args:
        name: Name of the entry.
        rounds: How often a step of each contender is measured, at least.
        steps: Steps of the comparison; None for those of the entry.
    """
    torch.set_num_threads(1)
    entry = find(name)
    trial, executor, eager = try_out(entry, steps)
    (batch,) = entry.batches(1)
    times = alternate(lambda: eager.step(batch), lambda: executor(**batch), rounds)
    return {
        "parameters": trial.parameters,
        "steps": trial.steps,
        "ops": trial.ops,
        "compile": trial.compile_seconds,
        "eager": statistics.median(first for first, _ in times),
        "ours": statistics.median(second for _, second in times),
        "ratio": statistics.median(first / second for first, second in times),
        "errors": [
            trial.ours.loss,
            trial.eager.loss,
            trial.ours.weights,
            trial.eager.weights,
        ],
        "complaint": trial.complaint(),
    }


def alternate(
    first: Callable[[], object], second: Callable[[], object], rounds: int
) -> list[tuple[float, float]]:
    """Return the processor time of two functions in each round, in seconds.

    Both run in one thread. Its processor time does not count while others use the processor. The
    turns of short functions have several calls, as training has: after the other's turn, the
    caches have nothing of theirs.
    """
    times: list[tuple[float, float]] = []
    start = time.perf_counter()
    first(), second()
    turns = [(call, max(1, int(TURN_SECONDS / _seconds(call, 1)))) for call in (first, second)]
    while len(times) < rounds or (
        time.perf_counter() - start < SECONDS and len(times) < MAX_ROUNDS
    ):
        one, other = (_seconds(call, count) for call, count in turns)
        times.append((one, other))
    return times


def _seconds(call: Callable[[], object], count: int) -> float:
    if count > 1:
        call()
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count


processes = FreshProcess(__spec__.name, {"measure": measure}, timeout=1200)


def measured(entry: Entry, rounds: int, steps: int | None = None) -> Row:
    """Return the figures of an entry, or why there are none."""
    missing = [package for package in entry.needs if find_spec(package) is None]
    if missing:
        return {"failure": f"needs {', '.join(missing)}"}
    try:
        row: Row | None = processes.call("measure", entry.name, rounds, steps)
    except RuntimeError as error:
        return {"failure": str(error).strip().splitlines()[-1]}
    return row or {"failure": "takes too long"}


def cells(entry: Entry, row: Row) -> list[str | float]:
    """Return the cells of a row under ``COLUMNS``."""
    if "failure" in row:
        return [entry.name, entry.data, row["failure"], *[""] * (len(COLUMNS) - 3)]
    return [
        entry.name,
        entry.data,
        f"{row['parameters'] / 1e6:.2f} M",
        str(row["steps"]),
        str(row["ops"]),
        row["compile"],
        1e3 * row["eager"],
        1e3 * row["ours"],
        row["ratio"],
        *(f"{error:.0e}" for error in row["errors"]),
    ]


PAGE = Path(__file__).parent / "zoo" / "page.md"
"""What the page says above its tables."""


def page(rows: Sequence[tuple[Entry, Row]]) -> str:
    """Return the page with all tables."""
    text = PAGE.read_text(encoding="utf-8")
    parts = [text.format(slack=SLACK, machine=describe_machine())]
    for library, group in groupby(rows, key=lambda row: row[0].library):
        found = list(group)
        parts.append(f"## {library}\n")
        parts.append("| " + " | ".join(COLUMNS) + " |")
        parts.append("|---|---|" + "---:|" * (len(COLUMNS) - 2))
        for entry, row in found:
            texts = [c if isinstance(c, str) else three_digits(c) for c in cells(entry, row)]
            parts.append("| " + " | ".join(texts) + " |")
        parts.append("\n" + summary(found) + "\n")
    return "\n".join(parts)


def summary(rows: Sequence[tuple[Entry, Row]]) -> str:
    """Return a sentence about the speed of some models."""
    ratios = {entry.name: row["ratio"] for entry, row in rows if "ratio" in row}
    if not ratios:
        return "None of them could be measured."
    slowest = min(ratios, key=lambda name: ratios[name])
    return (
        f"The median of eager/ours is {three_digits(statistics.median(ratios.values()))}, the "
        f"smallest {three_digits(ratios[slowest])} ({slowest})."
    )


def main() -> None:
    """Print the tables, or write the page."""
    if processes.serve():
        return
    parser = make_parser(__doc__, rounds=7)
    parser.add_argument("--page", type=Path, help="write the page of the documentation")
    parser.add_argument("--library", help="only the models of this library")
    parser.add_argument("--steps", type=int, help="steps of each comparison")
    parser.set_defaults(cases=list(ENTRIES))
    arguments = parser.parse_args()
    entries = [e for e in arguments.cases if arguments.library in (None, e.library)]
    os.environ["OMP_NUM_THREADS"] = "1"
    print(describe_machine())
    table = Table("Whole models", COLUMNS)
    rows: list[tuple[Entry, Row]] = []
    for entry in entries:
        row = measured(entry, arguments.rounds, arguments.steps)
        rows.append((entry, row))
        table.row(*cells(entry, row))
        if row.get("complaint"):
            print(f"{entry.name}: {row['complaint']}", file=sys.stderr)
    print("\n" + summary(rows))
    if arguments.page:
        arguments.page.write_text(page(rows), encoding="utf-8")
    if any(row.get("complaint") or "failure" in row for _, row in rows):
        sys.exit("some models fail or differ")


if __name__ == "__main__":
    main()
