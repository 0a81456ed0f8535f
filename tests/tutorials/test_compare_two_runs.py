"""The tutorial finds where its pairs of runs first differ, and shows it on a page."""

import pytest
from PIL import Image

import popsim_torch as poptorch
from popsim_torch.records.command import diff
from tests.tutorials.running import TUTORIALS, draw_few_digits, run_here

SCRIPT = TUTORIALS / "compare_two_runs" / "compare_two_runs.py"
STEPS = 6


@pytest.fixture(scope="module")
def digits_root(tmp_path_factory):
    return draw_few_digits(tmp_path_factory.mktemp("digits"), 320)


@pytest.fixture
def run_script(digits_root, tmp_path, monkeypatch, capsys):
    """Run the script in an empty folder, and return what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        flags = ("--steps", str(STEPS), "--data-root", str(digits_root))
        run_here(SCRIPT, *arguments, *flags)
        return capsys.readouterr().out

    return run


@pytest.mark.tutorial
def test_a_change_is_found_at_its_module(run_script, tmp_path, capsys):
    printed = run_script("change", "--output", "change.png")
    assert "First difference: step 0, micro-batch 0, tensor 'norm/" in printed
    assert "  module norm, " in printed and "compare_two_runs.py:" in printed
    with Image.open(tmp_path / "change.png") as image:
        assert image.width > 500
    page = (tmp_path / "change.html").read_text(encoding="utf-8")
    assert "<title>before and after</title>" in page
    assert diff(["before.popsim", "after.popsim"]) == 1
    assert capsys.readouterr().out.strip() == printed.strip()


@pytest.mark.tutorial
def test_precisions_differ_by_values(run_script, tmp_path):
    printed = run_script("precision", "--folder", str(tmp_path))
    runs = [poptorch.Run(tmp_path / f"{name}.popsim") for name in ("float32", "float16")]
    assert [run.meta["run"] for run in runs] == ["float32", "float16"]
    assert [run.steps for run in runs] == [list(range(STEPS))] * 2
    found = poptorch.compare(*runs, tolerance=2**-8)
    assert str(found) == printed.strip()
    assert found.by_value > 0 and found.growth[0].differing == 0
    assert not poptorch.compare(*runs, tolerance=1e-6).equal


@pytest.mark.tutorial
def test_a_program_computes_what_pytorch_computes(run_script, tmp_path):
    for _ in range(2):  # the second time replaces the runs
        printed = run_script("eager")
    assert "the runs are equal." in printed
    runs = [poptorch.Run(tmp_path / f"{name}.popsim") for name in ("program", "pytorch")]
    found = poptorch.compare(*runs, tolerance=1e-4)
    assert found.equal and {one.compared for one in found.growth} == {32}
    assert "Only in b" not in printed
