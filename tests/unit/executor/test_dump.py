"""``POPSIM_DUMP``: one folder for each compilation, with one text file for each step."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.passes import pipeline

FIRST = [
    *("trace", "functionalise", "name", "lower"),
    *("invent_inputs", "round_results"),
    *("rebuild_values", "name_stage_tensors", "bring_back"),
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x, y):
        return nn.functional.cross_entropy(torch.relu(self.fc(x)), y)


def compile_net():
    options = poptorch.Options().showCompilationProgressBar(False)
    model = poptorch.trainingModel(Net(), options)
    model.compile(torch.zeros(4, 3), torch.zeros(4, dtype=torch.long))
    return model


def steps(folder):
    return [path.stem.partition("_")[2] for path in sorted(folder.iterdir())]


def test_every_step_is_written_in_its_order(tmp_path, monkeypatch):
    monkeypatch.setenv("POPSIM_DUMP", str(tmp_path / "new"))
    model = compile_net()
    (folder,) = (tmp_path / "new").iterdir()
    assert folder.name == "001_Net_training"
    host = [run.__name__ for run in pipeline.HOST_PASSES]
    assert steps(folder) == [*FIRST, *host, "build", "compile_log"]
    last_stated = (folder / f"{len(FIRST) - 1:02}_bring_back.txt").read_text()
    assert last_stated == model.program()
    fitted = sorted(folder.iterdir())[-3]
    assert fitted.read_text() == model.program(host=True)
    assert sorted(folder.iterdir())[-1].read_text() == f"{model.compile_log()}\n"


def test_texts_have_names_stages_and_lines(tmp_path, monkeypatch):
    monkeypatch.setenv("POPSIM_DUMP", str(tmp_path))
    compile_net()
    (folder,) = tmp_path.iterdir()
    named = (folder / "02_name.txt").read_text()
    (line,) = (line for line in named.splitlines() if "'fc/Gemm:0'" in line)
    assert "forward 0, fc, " in line
    assert "test_dump.py:" in line
    assert "'Gradient___fc.weight'" in named
    lowered = (folder / "03_lower.txt").read_text()
    (line,) = (line for line in lowered.splitlines() if ": fc/Gemm:0: " in line)
    assert line.startswith("forward 0: ")
    assert "# fc, " in line and "test_dump.py:" in line
    (build,) = folder.glob("*_build.txt")
    assert "0F0 0B0 U" in build.read_text()


def test_compilations_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("POPSIM_DUMP", str(tmp_path))
    compile_net()
    compile_net()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "001_Net_training",
        "002_Net_training",
    ]


def test_without_the_variable_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("POPSIM_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    compile_net()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("POPSIM_DUMP", str(file / "inside"))
    with pytest.raises(poptorch.Error, match=r"POPSIM_DUMP=.*no folder can be created"):
        compile_net()
    monkeypatch.delenv("POPSIM_DUMP")
    assert compile_net().isCompiled()
