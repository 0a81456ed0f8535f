"""Runs a benchmark in several processes, which measure together."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import torch.distributed as dist


def run_in_processes(module: str, processes: int, rounds: int) -> None:
    """Run a benchmark under torchrun.

    Args:
        module: The benchmark's name in its folder.
        processes: The number of processes.
        rounds: What ``--rounds`` gets.

    Raises:
        CalledProcessError: A process has failed.
    """
    run = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    own = ["-m", f"benchmarks.{module}", f"--rounds={rounds}"]
    subprocess.run([sys.executable, *run, *own], check=True)


def seconds_together(update: Callable[[], object], updates: int = 1) -> float:
    """Return the time of an update, when all processes begin together.

    Args:
        update: Called by each process.
        updates: How often; a process with 0 only waits for the beginning.
    """
    dist.barrier()
    began = time.perf_counter()
    for _ in range(updates):
        update()
    return (time.perf_counter() - began) / max(updates, 1)
