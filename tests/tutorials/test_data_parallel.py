"""The tutorial of data parallelism: replicas and processes train alike."""

import os
import re
import subprocess
import sys

import pytest

from tests.tutorials.running import ROOT, TUTORIALS, draw_few_digits, run_alone, run_here

SCRIPT = TUTORIALS / "data_parallel" / "data_parallel.py"
FEW = ("--micro-batch-size", "4", "--updates", "3")
LINE = re.compile(r"^ +(\d) +(\d) +(\d) +([\d.]+) +(\d+) +[\d,]+ (\w{8})$", re.M)

pytestmark = pytest.mark.tutorial


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return str(draw_few_digits(tmp_path_factory.mktemp("digits"), 64))


def torchrun(*arguments: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(ROOT), str(TUTORIALS)])
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
def test_replicas_and_processes_train_alike(digits, capsys):
    run_here(SCRIPT, "--data-root", digits, *FEW)
    lines = LINE.findall(capsys.readouterr().out)
    assert [line[:3] for line in lines] == [("1", "1", "8"), ("1", "2", "4"), ("1", "4", "2")]
    assert {line[4] for line in lines} == {"0"}
    losses = [float(line[3]) for line in lines]
    assert max(losses) - min(losses) < 1e-4
    flags = ("--nproc-per-node", "2", str(SCRIPT), "--replicas", "1", "2")
    result = torchrun(*flags, "--data-root", digits, *FEW)
    assert result.returncode == 0, result.stderr
    divided = LINE.findall(result.stdout)
    assert [line[:3] for line in divided] == [("2", "1", "4"), ("2", "2", "2")]
    assert {line[4] for line in divided} == {"3"}
    # The same sums in the same order: two replicas, wherever they are, and four.
    assert [line[5] for line in divided] == [line[5] for line in lines[1:]]


def test_a_division_that_leaves_a_rest_is_explained(digits, tmp_path):
    result = run_alone(SCRIPT, tmp_path, "--data-root", digits, *FEW, "--replicas", "3")
    assert result.returncode == 1 and "pass --micro-batches with a multiple" in result.stderr
    assert "Traceback" not in result.stderr
