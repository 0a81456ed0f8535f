"""Threads that share work and hand values on: programs of their own, under a sanitizer.

ThreadSanitizer takes the barriers of OpenMP for races, and PyTorch uses OpenMP. So these programs
consist only of the parts that they test.
"""

import collections
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[2] / "csrc"
COMPILER = os.environ.get("CXX", "c++")
TASKS = ["threads/helpers.cpp", "threads/job.cpp", "threads/wait_policy.cpp"]
LANES = [
    *("threads/crew.cpp", "threads/progress.cpp", "memory/lanes.cpp", "memory/live_range.cpp"),
    *("graph/graph.cpp", "base/dtype.cpp", "base/shape.cpp"),
    *("schedule/facts.cpp", "schedule/generators.cpp", "schedule/text.cpp"),
]
FAULTY = """
#include <thread>
int number;
int main() {
  std::thread other([] { number = 1; });
  number = 2;
  other.join();
}
"""
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "libasan" in os.environ.get("LD_PRELOAD", ""), reason="one sanitizer at a time"
    ),
]


def build(source: Path, parts: list[str], program: Path) -> Path:
    """Compile a program for the sanitizer, from its source and parts of the library."""
    command = [COMPILER, "-std=c++20", "-O1", "-g1", "-Wall", "-pthread", "-fsanitize=thread"]
    command += ["-I", str(CSRC), str(source), *(str(CSRC / part) for part in parts)]
    subprocess.run([*command, "-o", str(program)], check=True, capture_output=True, timeout=240)
    return program


def start(program: Path, *arguments: str, report: bool = True) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(program), *arguments],
        env=os.environ | {"TSAN_OPTIONS": f"report_bugs={int(report)}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ended(program: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Return the exit code of a program, and what it wrote to stdout and stderr."""
    with program:
        try:
            out, err = program.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            program.kill()
            raise
    return program.returncode, out, err


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder for programs, if the compiler has a ThreadSanitizer that works here."""
    made = tmp_path_factory.mktemp("threads")
    source = made / "faulty.cpp"
    source.write_text(FAULTY)
    try:
        _, _, found = ended(start(build(source, [], made / "faulty")))
    except (OSError, subprocess.CalledProcessError):
        found = ""
    if "data race" not in found:
        pytest.skip("the compiler has no ThreadSanitizer that works here")
    return made


@pytest.fixture(scope="module")
def lanes(folder):
    return build(HERE / "lanes.cpp", LANES, folder / "lanes")


@pytest.fixture(scope="module")
def without_waits(lanes):
    """Return a running program that leaves one wait out at a time; it sleeps most of the time."""
    with start(lanes, report=False) as program:
        yield program
        program.kill()


@pytest.mark.usefixtures("without_waits")
def test_lanes_do_not_race(lanes):
    code, _, errors = ended(start(lanes, "all"))
    assert code == 0 and errors == "", errors[:3000]


def test_callers_and_helpers_do_not_race(folder):
    code, _, errors = ended(start(build(HERE / "tasks.cpp", TASKS, folder / "tasks")))
    assert code == 0 and errors == "", errors[:3000]


def test_values_are_wrong_without_any_wait_that_no_other_implies(without_waits):
    code, out, errors = ended(without_waits)
    assert code == 0, errors
    counts = collections.Counter(out.splitlines())
    assert counts.keys() == {"needed noticed", "implied unnoticed"}
    assert counts["needed noticed"] > 20
