"""The memory that remains after a model is compiled, run and destroyed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def growth(warm_up, cycles):
    """Return how many bytes and Python objects a new process keeps per cycle."""
    command = [sys.executable, "-m", "tests.unit.executor.memory_cycles", str(warm_up), str(cycles)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# A program that stays would take 40 kB; PyTorch's caches still grow by 1 to 6 kB.
def test_a_cycle_leaves_no_object_and_no_program():
    kept = growth(warm_up=20, cycles=40)
    assert kept["objects"] < 0.25
    assert kept["bytes"] < 20_000


# About 500 bytes; PyTorch's tracer alone (make_fx of the module) keeps 1 to 2 kB and 3 objects. Its
# caches, and those of the allocator, fill for 100 cycles.
@pytest.mark.slow
def test_two_hundred_cycles():
    kept = growth(warm_up=100, cycles=200)
    assert kept["objects"] < 0.25
    assert kept["bytes"] < 2_000
