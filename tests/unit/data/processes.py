"""Inspects processes and starts programs, for the tests of workers."""

import os
import subprocess
import sys
import time
from pathlib import Path

TIMEOUT = 120  # seconds; never reached unless something hangs


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # (the process that inherits it may never wait for it)


def wait_for_end(*pids):
    deadline = time.monotonic() + TIMEOUT
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline, "still running"
        time.sleep(0.01)


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker_pid(accessor):
    return accessor._worker.pid


_PROLOGUE = """
import itertools, os, signal, sys, time
# (shells have it ignored by what they run in the background)
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch
from popsim_torch import AsynchronousDataAccessor, DataLoader, DataLoaderMode, Options
from popsim_torch import SharingStrategy
class Slow:
    def __init__(self, seconds): self.seconds = seconds
    def __iter__(self):
        for i in range(5):
            yield torch.tensor(i)
            time.sleep(self.seconds)
def report(accessor):
    pid = accessor._worker.pid
    children = open(f"/proc/{pid}/task/{pid}/children").read()
    print("pids", pid, children, flush=True)
"""


def _write_program(folder, body):
    lines = body.rstrip().splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    path = folder / "script.py"
    path.write_text(_PROLOGUE + "\n".join(line[indent:] for line in lines) + "\n")
    # (so that it finds the same modules as this process)
    return [sys.executable, str(path)], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def run_program(folder, body):
    command, environment = _write_program(folder, body)
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
    )


_started = []


def end_programs():
    """End the programs that a failed test has left running."""
    while _started:
        process = _started.pop()
        process.kill()
        process.communicate()


def start_program(folder, body):
    """Start a program in its own process group; return the process and its report."""
    command, environment = _write_program(folder, body)
    process = subprocess.Popen(
        command,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    _started.append(process)
    words = process.stdout.readline().split()
    assert words[:1] == ["pids"], process.communicate(timeout=TIMEOUT)
    return process, [int(word) for word in words[1:]]
