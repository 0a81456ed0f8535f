"""PyTorch's own samples of all its operators and modules, on the device against eager PyTorch.

``sweep.py`` runs them in a process of its own, which is started again after a sample that ends it.
There is no target for how many must pass; the shares are printed. But no sample may end the
process, and none may give another result than eager PyTorch without saying so.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 300  # seconds without news from the process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]


@dataclass(frozen=True)
class Outcome:
    """What became of a sample: see ``sweep.py``, and ``crashed``."""

    case: str
    outcome: str
    detail: str


def _lines(process: subprocess.Popen) -> Iterator[dict | None]:
    """Yield what the process prints; None when it has said nothing for too long."""
    arrived: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            arrived.put(line)
        arrived.put("")

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = arrived.get(timeout=PATIENCE)
        except queue.Empty:
            process.kill()
            yield None
            return
        if not line:
            return
        yield json.loads(line)


def _run_from(kind: str, first: int) -> Generator[Outcome, None, int | None]:
    """Yield outcomes until the process ends; return where to go on, None at the end."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.parity.sweep", kind, str(first)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        name, samples, detail = None, 0, ""
        for line in _lines(process):
            if line is None:
                detail = f"no answer in {PATIENCE} s"
            elif "group" in line:
                first, name, samples = line["group"] + 1, line["name"], 0
            else:
                samples += 1
                yield Outcome(line["case"], line["outcome"], line["detail"])
    if process.returncode == 0:
        return None
    detail = detail or f"exit code {process.returncode}"
    yield Outcome(f"{name} [{samples}]", "crashed", detail)
    return None if name is None else first


def run_sweep(kind: str) -> Iterator[Outcome]:
    """Yield the outcome of every sample of a kind: ``ops``, ``complex`` or ``modules``."""
    first: int | None = 0
    while first is not None:
        first = yield from _run_from(kind, first)


def report(kind: str, outcomes: list[Outcome]) -> None:
    counts = Counter(outcome.outcome for outcome in outcomes)
    tried = sum(counts.values()) - counts["skipped"]
    print(f"\n{kind}: {tried} samples ({counts['skipped']} say nothing about the device)")
    for outcome in ("passed", "unsupported", "unclear", "wrong", "crashed"):
        print(f"  {outcome:12} {counts[outcome]:5}  {100 * counts[outcome] / tried:5.1f} %")
    for outcome in outcomes:
        if outcome.outcome in ("unclear", "wrong", "crashed"):
            print(f"  {outcome.outcome}: {outcome.case}: {outcome.detail[:300]}")


@pytest.mark.parametrize("kind", ["ops", "complex", "modules"])
def test_sweep(kind, capsys):
    outcomes = list(run_sweep(kind))
    with capsys.disabled():
        report(kind, outcomes)
    assert [o for o in outcomes if o.outcome == "crashed"] == []
    assert [o for o in outcomes if o.outcome == "wrong"] == []
    assert any(o.outcome == "passed" for o in outcomes)
