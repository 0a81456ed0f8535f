"""The tutorial of profiling: reports of a pipeline, of many steps in a call, of more calls."""

import json
import re

import pytest

from popsim_torch import report
from tests.tutorials.running import TUTORIALS, draw_few_digits, run_alone, run_here

FOLDER = TUTORIALS / "profiling"
FILES = ["debug.json", "framework.json", "profile.pop", "report.html", "trace.json"]

pytestmark = pytest.mark.tutorial


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    return str(draw_few_digits(tmp_path_factory.mktemp("digits"), 320))


@pytest.fixture
def run_script(digits, tmp_path, monkeypatch, capsys):
    """Run a program in this process and an empty folder; return what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(script: str, *arguments: str) -> str:
        run_here(FOLDER / script, "--data-root", digits, "--micro-batch-size", "4", *arguments)
        return capsys.readouterr().out

    return run


def test_the_variable_asks_for_a_report_and_changes_no_loss(run_script, digits, tmp_path):
    plain = run_script("profiling.py")
    assert list(tmp_path.iterdir()) == []
    variables = {
        "POPLAR_ENGINE_OPTIONS": '{"autoReport.all":"true", "autoReport.directory":"reports"}',
        "PVTI_OPTIONS": '{"enable":"true", "directory":"host"}',
    }
    arguments = ("--data-root", digits, "--micro-batch-size", "4")
    result = run_alone(FOLDER / "profiling.py", tmp_path, *arguments, **variables)
    assert result.returncode == 0, result.stderr
    assert result.stdout == plain
    folder = tmp_path / "reports" / "training"
    assert sorted(one.name for one in folder.iterdir()) == FILES
    found = report.open(folder)
    assert (found.calls, len(found.runs), len(found.memory)) == (10, 2, 2)
    assert set(found.by_purpose()) == {"gradient accumulation", "SGD"}
    (host,) = (tmp_path / "host").iterdir()
    for trace in (host, folder / "trace.json"):
        names = [event["name"] for event in json.loads(trace.read_text())["traceEvents"]]
        assert names.count("training.batch") == names.count("training.call") == 10


def test_more_micro_batches_for_an_update_wait_less(run_script):
    for name, micro_batches in (("few", "4"), ("many", "16")):
        run_script("profiling.py", "--report", name, "--micro-batches", micro_batches)
    few, many = (report.open(f"{name}/training") for name in ("few", "many"))
    figures = {one.name: one for one in few.compare(many).figures()}
    assert figures["seconds for an item"].ratio < 1
    waiting = figures["  of a call: waiting"]
    assert waiting.first > 0 and waiting.ratio < 4  # for four times as many items


def test_many_steps_in_a_call_cost_less_than_calls_of_one(run_script, tmp_path):
    printed = run_script("many_steps.py", "--steps", "12", "--steps-in-a-call", "4")
    assert printed.endswith(
        "The same weights, to the last bit: True\nThe page: steps/comparison.html\n"
    )
    assert re.search(r"^device iterations in a call +1 +4 +x 4$", printed, re.M)
    assert re.search(r"^calls +12 +3 +x 0.25$", printed, re.M)
    one, many = (report.open(tmp_path / "steps" / name / "training") for name in ("one", "many"))
    cycles = [found.estimate["call"]["cycles"] for found in (one, many)]
    assert cycles[0] < cycles[1] < 4 * cycles[0]
    assert "<html" in (tmp_path / "steps" / "comparison.html").read_text()


@pytest.mark.parametrize(("steps", "use"), [("25", 30), ("7", 10)])
def test_steps_that_do_not_fit(run_script, capsys, steps, use):
    with pytest.raises(SystemExit):
        run_script("many_steps.py", "--steps", steps)
    error = capsys.readouterr().err
    assert f"--steps ({steps}) must be a multiple of --steps-in-a-call (10): use {use}." in error


def test_more_recorded_calls_make_larger_reports(run_script, tmp_path):
    printed = run_script("report_sizes.py", "--recorded", "1", "3", "12", "--calls", "12")
    rows = re.findall(r"^ +(\d+) +([\d,]+) kB +([\d,]+) kB +([\d,]+) kB +[\d,]+ ms$", printed, re.M)
    assert [row[0] for row in rows] == ["1", "3", "12"]
    for row in rows:
        folder = tmp_path / "sizes" / row[0] / "training"
        for size, name in zip(row[1:], ("profile.pop", "trace.json", "report.html"), strict=True):
            assert size == f"{(folder / name).stat().st_size / 1000:,.0f}"
    for sizes in list(zip(*rows, strict=True))[1:3]:
        profile = [int(one.replace(",", "")) for one in sizes]
        assert profile[0] < profile[1] < profile[2]
    estimates = [report.open(f"sizes/{row[0]}/training").estimate for row in rows]
    assert estimates[0] == estimates[1] == estimates[2]


def test_the_readme_shows_the_rows_of_the_comparisons(run_script):
    page = (FOLDER / "README.md").read_text()
    shown = re.findall(r"^simulated +one +many +change\n(.*?)```", page, re.M | re.S)[0]
    printed = run_script("many_steps.py", "--steps", "10", "--steps-in-a-call", "10")
    names = [line[:28].strip() for line in shown.splitlines() if line[:1] not in ("n", "")]
    assert len(names) > 15
    assert [name for name in names if name not in printed] == []
