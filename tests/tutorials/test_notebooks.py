"""The notebooks of the tutorials are made from their READMEs, and run from start to end."""

import os
import re
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.tutorials.running import ROOT, TUTORIALS, copy_tutorials, draw_few_digits

sys.path.insert(0, str(ROOT / "docs"))
import notebooks

# Smaller values than those of the READMEs, where these take long.
PARAMETERS = {
    "compare_two_runs": {"STEPS": 4},
    "custom_op": {},
    "data_parallel": {},
    "find_the_nan": {"FAULT": "bad-data", "OUTPUT": "map.png"},
    "gradient_health": {"STEPS": 4},
    "infeed_outfeed": {"STEPS": 20, "STEPS_PER_EXECUTION": 10},
    "inspecting_tensors": {"REPEAT_COUNT": 4, "MODEL_REPEAT_COUNT": 4},
    "observing_tensors": {"STEPS": 3, "BATCH_SIZE": 100},
    "pipelined_inspection": {"STEPS_PER_EPOCH": 8},
    "pipelining": {"NETWORK": "mlp"},
    "planning": {"LENGTH": 64},
    "profiling": {"STEPS": 4, "STEPS_IN_A_CALL": 2, "CALLS": 3},
    "training_loops": {"BATCHES": 8},
}


def run(name: str, folder: Path, monkeypatch) -> list[str]:
    """Run a notebook with its parameters; return what its cells print."""
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(TUTORIALS)]))
    draw_few_digits(folder / "home" / ".torch" / "datasets", 320)
    path = copy_tutorials(folder) / name / f"{name}.ipynb"
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if notebooks.PARAMETERS in cell.metadata.get("tags", ()):
            values = [f"{key} = {value!r}" for key, value in PARAMETERS[name].items()]
            cell.source = "\n".join([cell.source, *values])
    client = NotebookClient(
        notebook, timeout=250, resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert all("image/png" in o.data for o in outputs if o.output_type == "display_data")
    return [output.text for output in outputs if output.output_type == "stream"]


def test_each_tutorial_has_a_notebook():
    assert notebooks.names() == sorted(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_notebook_is_what_its_readme_says(name):
    """``make notebooks`` writes them anew."""
    assert notebooks.path(name).read_text(encoding="utf-8") == notebooks.text(name)


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_parameters_of_a_notebook_stand_in_one_cell(name):
    cells = nbformat.reads(notebooks.text(name), as_version=4).cells
    tagged = [cell for cell in cells if notebooks.PARAMETERS in cell.metadata.get("tags", ())]
    assert len(tagged) == (1 if PARAMETERS[name] else 0)
    named = {}
    for cell in tagged:
        exec(cell.source, named)
    assert PARAMETERS[name].keys() <= named.keys()


def test_flags_with_several_values_have_several_names():
    parameters = {}
    shown = []
    for value in ("1", "2", "3", "2", "1"):
        (cell,) = notebooks._runs("train.py", ["--steps", value], parameters)
        shown.append(re.search(r"\{(\w+)\}", cell.source)[1])
    assert [parameters[name] for name in shown] == ["1", "2", "3", "2", "1"]
    assert parameters == {"STEPS": "1", "TRAIN_STEPS": "2", "TRAIN_STEPS_2": "3"}


@pytest.mark.slow
@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.tutorial
def test_a_notebook_runs_with_other_parameters(name, tmp_path, monkeypatch):
    printed = "".join(run(name, tmp_path, monkeypatch))
    if name == "observing_tensors":
        assert "step 3: loss" in printed and "Loss: " in printed
        assert "over 3 batches" in printed  # 320 digits in batches of 100
