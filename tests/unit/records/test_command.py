"""The command ``popsim diff``."""

import json
import sys

import pytest

from popsim_torch import __main__ as commands
from popsim_torch.observe.record import Record
from popsim_torch.records import RunWriter
from popsim_torch.statistics import Statistics
from tests.unit.records.runs import write_run


@pytest.fixture
def diff(monkeypatch, capsys):
    """Return a function that runs the command: its exit code, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["popsim", "diff", *map(str, arguments)])
        code = commands.main()
        return code, *capsys.readouterr()

    return run


def scaled(step, name, tensor):
    return tensor * 1.001 if step == 2 else tensor


def test_equal_runs(diff, tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    code, out, err = diff(a, b)
    assert (code, err) == (0, "") and "the runs are equal" in out


def test_runs_that_differ(diff, tmp_path):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", scaled)
    code, out, _ = diff(a, b)
    assert code == 1 and "First difference: step 2, micro-batch 0, tensor 'input'" in out
    assert diff(a, b, "--tolerance", "0.01")[0] == 0
    code, out, _ = diff("--json", a, b)
    found = json.loads(out)
    assert code == 1 and not found["equal"]
    assert (found["first"]["name"], found["first"]["step"]) == ("input", 2)
    assert found["first"]["a"]["norm"] < found["first"]["b"]["norm"]
    assert [one["differing"] for one in found["growth"]] == [0, 0, 4, 0]


def test_mistakes(diff, tmp_path):
    a = write_run(tmp_path / "a")
    code, out, err = diff(a, tmp_path / "none")
    assert (code, out) == (2, "") and f"popsim diff: {tmp_path}/none: there is no run" in err
    for arguments in ([], [a], [a, a, a], [a, a, "--slow"], [a, a, "--tolerance", "x"]):
        code, out, err = diff(*arguments)
        assert (code, out) == (2, "") and err.startswith("usage: popsim diff")
    code, out, err = diff(a, a, "--tolerance", "-1")
    assert code == 2 and "--tolerance" in err


def test_help(diff):
    code, out, _ = diff("--help")
    assert code == 0 and "exit code is 0 if the runs are equal, 1 if they differ" in out


def test_runs_with_only_inputs_in_common_are_not_called_equal(diff, tmp_path):
    one = Statistics(1, 0, 0, fingerprint=1)
    for path, name in (("a", "Gradient___x.weight"), ("b", "Gradient___y.scale")):
        with RunWriter(tmp_path / path) as writer:
            writer.write_records([Record(each, 0, 0, 0, one) for each in ("input", name)])
    code, out, _ = diff(tmp_path / "a", tmp_path / "b")
    assert code == 2 and "equal" not in out
    assert "none of them differs, but too little was compared to say more." in out
    assert "\nOnly inputs and hyper-parameters were compared: input.\n" in out
    assert "a has Gradient___x.weight; b has Gradient___y.scale." in out
    found = json.loads(diff("--json", tmp_path / "a", tmp_path / "b")[1])
    assert not found["equal"] and found["first"] is None and len(found["missing"]) == 2


def test_runs_with_nothing_in_common_cannot_be_compared(diff, tmp_path):
    RunWriter(tmp_path / "b").close()
    code, out, _ = diff(write_run(tmp_path / "a"), tmp_path / "b")
    assert code == 2 and "Nothing could be compared" in out
