"""The tutorial of planning: what does not fit on one IPU gets a plan for several."""

import re

import pytest

from tests.tutorials.running import TUTORIALS, run_here

FOLDER = TUTORIALS / "planning"
LINE = re.compile(r"^(.+?) +(\d+)% (fits|close|does not fit) +([\d,]+)$", re.MULTILINE)

pytestmark = pytest.mark.tutorial


def ways(*arguments, capsys):
    run_here(FOLDER / "planning.py", *arguments)
    printed = capsys.readouterr().out
    found = {
        way: (int(share), verdict, int(rate.replace(",", "")))
        for way, share, verdict, rate in LINE.findall(printed)
    }
    return found, printed


@pytest.mark.slow
def test_the_plan_is_the_fastest_way_that_fits(capsys):
    sizes = ("--layers", "7", "--ipus", "2", "--vocabulary", "2000")
    found, printed = ways(*sizes, capsys=capsys)
    assert list(found) == ["1 IPU", "2 IPUs", "2 IPUs, recomputing", "as planned"]
    assert found["1 IPU"][1] == "does not fit"
    assert found["2 IPUs, recomputing"][0] < found["2 IPUs"][0]
    planned = found.pop("as planned")
    assert planned[1] != "does not fit"
    assert planned[2] >= max(rate for _, verdict, rate in found.values() if verdict == planned[1])
    assert "alternatives in all" in printed
