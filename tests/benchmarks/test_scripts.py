"""Every benchmark runs: the smallest configuration of each, looked at for what it must print."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Options of a small run, and the first cells of the rows that it prints.
SMALL = {
    "anchors": (["--only", "MLP", "--rounds", "1"], ["MLP 32"]),
    "call_overhead": (
        ["--rounds", "1"],
        ["inference of x + 1", "function: training of 200 layers", "empty program"],
    ),
    "compile_time": (["--sizes", "10", "--models", "--compile-limit", "0"], ["chain of 10"]),
    "feeds": (
        ["--rounds", "1", "--steps", "20"],
        ["picked", "waited for", "computed", "there already"],
    ),
    "inference": (
        ["--only", "LSTM", "--rounds", "1", "--no-compile", "--iterations", "1"],
        ["LSTM 16"],
    ),
    "memory": (["--only", "MLP 32 float16"], ["MLP 32 float16"]),
    "models": (["--only", "graph attention", "--rounds", "1"], ["graph attention"]),
    "neighbours": (["--rounds", "1", "--seconds", "0.05"], ["16 x 64, 16", "16 x 1024, 128"]),
    "observing": (["--only", "MLP 32", "--rounds", "1"], ["MLP 32"]),
    "optimizers": (["--rounds", "1", "--names", "Adagrad"], ["Adagrad"]),
    "pipelines": (["--rounds", "1"], ["8 x 96, 8, 64", "8 x 768, 64, 16"]),
    "processes": (["--rounds", "1"], ["784-320-100-10, 64", "4 x 1024, 512"]),
    "queues": (
        ["--rounds", "1", "--large", "4", "--small", "50"],
        ["into a program", "followed while it runs", "queue.Queue between threads"],
    ),
    "replicas": (["--rounds", "1"], ["8 x 96, 8, 32", "8 x 768, 64, 16"]),
    "roofline": (["--only", "MLP 32 float16", "--rounds", "1", "--ops", "2"], ["matmul"]),
    "torch_pipelining": (["--rounds", "1"], ["8 x 96, 8, 64", "8 x 768, 64, 16"]),
    "training_step": (
        ["--only", "CNN", "--rounds", "1", "--no-compile", "--iterations", "1"],
        ["CNN 32"],
    ),
}


def run(name, options):
    return subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_every_script_is_listed() -> None:
    assert set(SMALL) == {path.stem for path in (ROOT / "benchmarks").glob("*.py")}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_script_prints_its_tables(name) -> None:
    options, rows = SMALL[name]
    done = run(name, options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert re.match(r"\d{4}-\d\d-\d\d: .* torch ", lines[0])
    tables = [line for line in lines if line.startswith("|")]
    for row in rows:
        assert any(line.startswith(f"| {row} |") for line in tables), done.stdout
    numbers = [cell for line in tables for cell in line.split("|") if re.search(r"\d", cell)]
    assert len(numbers) > 3


@pytest.mark.slow
def test_what_a_peak_allows() -> None:
    done = run("roofline", ["--only", "MLP 1000 float16", "--rounds", "3", "--peak", "1e6"])
    row = next(line for line in done.stdout.splitlines() if line.startswith("| MLP 1000"))
    _, ours, at_the_peak, *_ = map(float, row.split("|")[2:-1])
    assert 0 < at_the_peak < ours


@pytest.mark.slow
def test_unknown_case_is_refused() -> None:
    done = run("training_step", ["--only", "nothing like it"])
    assert done.returncode == 2
    assert "no such case; the cases are MLP 32" in done.stderr
