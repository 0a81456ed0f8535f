"""``popsim report``."""

import sys

import pytest

from popsim_torch import __main__
from popsim_torch.report import command
from popsim_torch.report.folder import to_text
from tests.report.data import make_report


@pytest.fixture
def folders(tmp_path, monkeypatch):
    for name, settings in (("a", {}), ("b", {"iterations": 1, "seed": 1})):
        for program in ("training", "inference"):
            folder = tmp_path / name / program
            folder.mkdir(parents=True)
            data = make_report(training=program == "training", name=program, **settings)
            (folder / "profile.pop").write_text(to_text(data))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["popsim", "report", *map(str, arguments)])
    code = __main__.main()
    out, err = capsys.readouterr()
    return code, out, err


def test_a_report_is_printed_and_its_page_named(folders, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "a/training")
    assert (code, err) == (0, "")
    assert "program:                    training (training)" in out
    assert out.endswith("\n\nThe page: a/training/report.html\n")
    assert "Report of training" in (folders / "a/training/report.html").read_text()
    (folders / "a/training/report.html").write_text("kept")
    code, out, _ = run(monkeypatch, capsys, "a/training", "--operations")
    assert code == 0 and out.startswith("Simulated cycles of a call") and "program:" not in out
    assert (folders / "a/training/report.html").read_text() == "kept"


def test_two_reports_are_compared(folders, monkeypatch, capsys):
    code, out, err = run(monkeypatch, capsys, "--compare", "a/training", "b/training")
    assert (code, err) == (0, "")
    assert "cycles of a call" in out and out.endswith("The page: comparison.html\n")
    assert "<title>a and b</title>" in (folders / "comparison.html").read_text()


def test_the_program_of_the_same_name_is_compared(folders, monkeypatch, capsys):
    arguments = ("--compare", "a", "b/inference", "--output", "it.html")
    code, out, _ = run(monkeypatch, capsys, *arguments)
    assert code == 0 and "The page: it.html" in out and (folders / "it.html").exists()
    (line,) = (line for line in out.splitlines() if line.startswith("micro-batches per update"))
    assert line.split()[3:] == ["1", "1", "equal"]


def test_of_several_timed_reports_the_newest_is_shown(folders, monkeypatch, capsys):
    for day, layers in ((3, 2), (4, 6), (2, 4)):
        folder = folders / "c" / f"popsim_report__2026-11-0{day}__10-00-00.000__{day}"
        folder.mkdir(parents=True)
        (folder / "profile.pop").write_text(to_text(make_report(layers=layers)))
    code, out, _ = run(monkeypatch, capsys, "c")
    assert code == 0 and out.startswith("c has 3 reports; this is the newest.\n")
    assert "fc5" in out and "popsim_report__2026-11-04__10-00-00.000__4/report.html" in out
    code, out, _ = run(monkeypatch, capsys, "--compare", "c", "a/training")
    assert code == 0 and "c has 3 reports" in out


def test_the_page_is_opened(folders, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr(command.webbrowser, "open", opened.append)
    run(monkeypatch, capsys, "a/training", "--open")
    assert opened == [(folders / "a/training/report.html").as_uri()]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "name one report, or two after --compare"),
        (("a/training", "--compare", "a", "b"), "name one report, or two"),
        (("a/training", "--output", "x"), "--output is for --compare"),
        (("nowhere",), "there is nothing at 'nowhere'"),
        (("a",), "'a' has 2 reports"),
        (("--compare", "a", "b"), "has 2 reports"),
        (("--compare", "a"), "expected 2 arguments"),
        (("--unknown", "a"), "unrecognized arguments"),
    ],
)
@pytest.mark.usefixtures("folders")
def test_mistakes(monkeypatch, capsys, arguments, problem):
    code, out, err = run(monkeypatch, capsys, *arguments)
    assert code == 2 and problem in err and out == ""


def test_a_page_that_cannot_be_written(folders, monkeypatch, capsys):
    code, _, err = run(
        monkeypatch, capsys, "--compare", "a/training", "b/training", "--output", "x/y"
    )
    assert code == 1 and "the page cannot be written" in err


def test_the_help_names_the_command(monkeypatch, capsys):
    code, out, _ = run(monkeypatch, capsys, "--help")
    assert code == 0 and "popsim report --compare" in out
