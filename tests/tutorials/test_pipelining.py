"""The tutorial of pipelining: what its script prints and draws."""

import re

import pytest
from PIL import Image

from tests.sweeps import sampled
from tests.tutorials.running import TUTORIALS, draw_few_digits, run_alone, run_here

SCRIPT = TUTORIALS / "pipelining" / "pipelining.py"
FEW = ("--gradient-accumulation", "8", "--micro-batch-size", "4", "--updates", "2", "--rounds", "1")

pytestmark = pytest.mark.tutorial


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return str(draw_few_digits(tmp_path_factory.mktemp("digits"), 64))


@pytest.mark.parametrize("network", sampled(["mlp", "transformer"], quick=["mlp"]))
def test_all_schedules_are_shown_and_give_the_same_weights(network, digits, capsys):
    run_here(SCRIPT, "--data-root", digits, "--network", network, *FEW)
    printed = capsys.readouterr().out
    for stages in (2, 4):
        for name in ("Grouped", "Interleaved", "Sequential", "Default"):
            title = f"{name}, training: {stages} stages, 8 micro-batches per weight update"
            assert f"{title}; 2 updates in a call\n" in printed
    lines = re.findall(r"^ +(\d) (\w+) +(\d+)% +(\d+)% +([\d,]+)$", printed, re.M)
    assert [int(line[0]) for line in lines] == [1] + [2] * 4 + [4] * 4
    planned = {(int(line[0]), line[1]): int(line[2]) for line in lines}
    assert planned[1, "Sequential"] == 100 and planned[4, "Sequential"] == 25
    assert planned[2, "Grouped"] == planned[2, "Interleaved"] == planned[2, "Default"] == 89
    assert all(int(line[3]) <= 100 and line[4] != "0" for line in lines)
    assert printed.endswith("The same weights in all of them, to the last bit: True\n")


def test_a_picture_of_balanced_stages(digits, tmp_path):
    flags = ("--stages", "2", "--schedules", "Grouped", "--balance", "--output", "plan.png")
    result = run_alone(SCRIPT, tmp_path, "--data-root", digits, *FEW, *flags)
    assert result.returncode == 0, result.stderr
    assert "Times: means over the micro-batches of the recorded run." in result.stdout
    with Image.open(tmp_path / "plan.png") as picture:
        assert picture.width > 800 and picture.height > 300


def test_a_count_that_does_not_fit_is_explained(digits, tmp_path):
    flags = ("--stages", "4", "--schedules", "Grouped", "--gradient-accumulation", "6")
    result = run_alone(SCRIPT, tmp_path, "--data-root", digits, *FEW, *flags)
    assert result.returncode == 1 and "multiple of 8" in result.stderr
    assert "Traceback" not in result.stderr
