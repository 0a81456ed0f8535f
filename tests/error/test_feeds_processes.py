"""Processes that end or fork while loops run on queues: none hangs, and none crashes."""

import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.sweeps import sampled

pytestmark = pytest.mark.timeout(120, method="thread")

_PROLOGUE = """
import os, signal, sys, threading, time
# (shells have it ignored by what they run in the background)
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch
import popsim_torch as poptorch
from tests.error.running_loops import FOREVER, Follower, Gate, Job, counting, passing, until
"""


def run(folder, body, expect=(0,)):
    """Run a program; return its output."""
    path = folder / "program.py"
    path.write_text(_PROLOGUE + textwrap.dedent(body))
    root = Path(__file__).resolve().parents[2]
    # (so that it finds the same modules as this process)
    found = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root), *filter(None, sys.path)]),
        "POPTORCH_LOG_LEVEL": "ERR",  # (loops that wait for data log a warning)
    }
    done = subprocess.run(
        [sys.executable, path], env=found, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode in expect, done.stderr
    if not done.returncode:
        assert not done.stderr
    return done.stdout


# Each program ends at the end of its code, while a thread does what the name says.
EXITS = {
    "computing": """
        outfeed = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)
        run = Job(counting(outfeed, FOREVER))
        until(lambda: outfeed.statistics()["enqueued"] > 100)
    """,
    "waiting for data": """
        infeed, outfeed = poptorch.InfeedQueue(Gate()), poptorch.OutfeedQueue()
        run, follower = Job(passing(infeed, outfeed, 5)), Follower(outfeed)
        until(lambda: follower.elements)
    """,
    "waiting for a reader": """
        outfeed = poptorch.OutfeedQueue(max_bytes=40)
        run = Job(counting(outfeed, FOREVER))
        until(lambda: outfeed.statistics()["enqueued"] == 10)
    """,
}


@pytest.mark.parametrize("where", sampled(EXITS, ["waiting for a reader"]))
def test_the_process_ends_in_the_middle(tmp_path, where):
    printed = run(tmp_path, textwrap.dedent(EXITS[where]) + "print('leaving')\n")
    assert printed == "leaving\n"


def test_the_process_ends_while_it_compiles(tmp_path):
    """The process must not hang, but may crash: PyTorch may fail when Python ends a thread."""
    body = """
        outfeed = poptorch.OutfeedQueue()
        run, follower = Job(counting(outfeed, FOREVER)), Follower(outfeed)
        print('leaving', flush=True)
    """
    assert run(tmp_path, body, (0, -signal.SIGABRT, -signal.SIGSEGV)) == "leaving\n"


def test_ctrl_c_ends_the_process(tmp_path):
    body = """
        outfeed = poptorch.OutfeedQueue(max_bytes=40)
        program = counting(outfeed, FOREVER)
        def press():
            until(lambda: outfeed.statistics()["enqueued"] == 10)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=press).start()
        program()
    """
    assert run(tmp_path, body, (-signal.SIGINT,)) == ""


def test_a_fork_in_the_middle(tmp_path):
    """The child is refused at once, whatever the parent's threads do; both processes end."""
    body = """
        gate = Gate()
        infeed, outfeed = poptorch.InfeedQueue(gate), poptorch.OutfeedQueue()
        ready, full = poptorch.InfeedQueue(range(100)), poptorch.OutfeedQueue()
        program, other = passing(infeed, outfeed, 5), passing(ready, full, 4)
        other()
        run, follower = Job(program), Follower(outfeed)
        until(lambda: follower.elements)
        child = os.fork()
        if child == 0:
            uses = (program, other, outfeed.poll, outfeed.dequeue, lambda: infeed.initializer,
                    lambda: Follower(outfeed).value(), infeed.reset)
            for use in uses:
                try:
                    use()
                except poptorch.Error as error:
                    print(error)
            del infeed, outfeed, ready, full, program, other
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        gate.let(4)
        run.value()
        assert follower.wait() is None and follower.elements == [0.0, 1.0, 2.0, 3.0, 4.0]
        other()
        assert full.dequeue().tolist() == list(range(8))
        infeed.close()
        print("parent")
    """
    lines = run(tmp_path, body).splitlines()
    assert lines[-1] == "parent"
    refused = r".*Queue: the queue was made in process \d+, and this is process \d+. Queues are not"
    assert len(lines) == 8 and all(re.match(refused, line) for line in lines[:-1]), lines
