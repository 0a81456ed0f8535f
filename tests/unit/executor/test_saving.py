"""``save``, ``compileAndExport`` and ``loadExecutable``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import _C
from popsim_torch.executor import saving
from popsim_torch.files.executable import ExecutableFile
from tests.options import make_options
from tests.unit.executor.nets import Function, Net, batch, infer, train


def exported(tmp_path, net=None, **more):
    """Return the file of a trained model, and the executor."""
    model = train(net or Net())
    model(*batch())
    path = tmp_path / "model.file"
    model.save(path, **more)
    return path, model


def test_a_model_that_is_not_compiled_cannot_be_saved(tmp_path):
    with pytest.raises(poptorch.Error, match="has not been compiled or has been destroyed"):
        train(Net()).save(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_the_file_has_exactly_the_name_given(tmp_path):
    model = infer(Net())
    model.compile(batch()[0])
    model.save(tmp_path / "a" / "b" / "name.of.it")
    model.save(str(tmp_path / "a" / "other"))
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "other"]
    assert os.listdir(tmp_path / "a" / "b") == ["name.of.it"]


def test_a_folder_gets_a_file_and_a_warning(tmp_path, caplog):
    model = infer(Net())
    model.compile(batch()[0])
    model.save(tmp_path)
    assert os.listdir(tmp_path) == ["model.poptorch"]
    assert "is a folder" in caplog.text


def test_a_name_that_is_no_path_is_refused():
    model = infer(Net())
    model.compile(batch()[0])
    with pytest.raises(poptorch.Error, match="pass a path"):
        model.save(3)


def test_a_path_where_nothing_can_be_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    model = infer(Net())
    model.compile(batch()[0])
    with pytest.raises(poptorch.Error, match="cannot be created"):
        model.save(tmp_path / "file" / "below")


def test_saving_changes_nothing(tmp_path):
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    one, reference = train(net), train(other)
    torch.manual_seed(1)
    data = [batch() for _ in range(3)]
    for part in data:
        a = one(*part)
        one.save(tmp_path / "file")
        b = reference(*part)
        assert torch.equal(a[1], b[1])
    assert torch.equal(net.fc1.weight, other.fc1.weight)


def test_compile_and_export_is_both(tmp_path):
    model = infer(Net())
    model.compileAndExport(tmp_path / "file", batch()[0])
    assert model.isCompiled()
    x = batch()[0]
    assert torch.equal(poptorch.load(tmp_path / "file")(x), model(x))


def test_compile_and_export_hands_keywords_to_forward(tmp_path):
    model = train(Net())
    x, y = batch()
    model.compileAndExport(tmp_path / "file", x, y=y, export_model=False)
    other = train(Net())
    other.loadExecutable(tmp_path / "file")
    other(x, y=y)


# --- loadExecutable -----------------------------------------------------------


@pytest.mark.parametrize("export_model", [True, False])
def test_load_executable_takes_the_weights_of_the_model(tmp_path, export_model):
    path, _ = exported(tmp_path, export_model=export_model)
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    model, reference = train(net), train(twin)
    model.loadExecutable(path)
    assert model.isCompiled()
    assert model.isAttachedToDevice()
    for _ in range(2):
        part = batch()
        assert torch.equal(model(*part)[1], reference(*part)[1])
    assert torch.equal(net.fc1.weight, twin.fc1.weight)


def test_load_executable_traces_forward_once(tmp_path):
    path, _ = exported(tmp_path)
    calls = []

    class Notes(Net):
        def forward(self, x, y=None):
            calls.append(tuple(x.shape))
            return super().forward(x, y)

    model = train(Notes())
    model.loadExecutable(path)
    model(*batch())
    assert calls == [(6, 4)]


class Doubled(Net):
    def forward(self, x, y=None):
        return super().forward(x * 2, y)


class Wider(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 6)

    def forward(self, x, y):
        out = self.fc1(x)
        return out, nn.functional.cross_entropy(out, y)


@pytest.mark.parametrize("kind", [Doubled, Wider])
def test_the_file_of_a_model_that_does_something_else_is_refused(tmp_path, kind):
    path, _ = exported(tmp_path)
    model = train(kind())
    with pytest.raises(poptorch.Error, match=r"differs from that of this model\. The file has '"):
        model.loadExecutable(path)
    assert not model.isCompiled()
    model(*batch())


def test_a_file_for_other_options_is_refused(tmp_path):
    path, _ = exported(tmp_path)
    options = make_options()
    options.anchorTensor("a", "input")
    with pytest.raises(poptorch.Error, match="other options"):
        train(Net(), options).loadExecutable(path)
    momentum = Net()
    optimizer = torch.optim.SGD(momentum.parameters(), lr=0.1, momentum=0.5)
    with pytest.raises(poptorch.Error, match="another optimizer"):
        train(momentum, None, optimizer).loadExecutable(path)
    with pytest.raises(poptorch.Error):
        infer(Net()).loadExecutable(path)


def test_a_program_that_is_longer_is_told_as_such(tmp_path):
    path, model = exported(tmp_path)
    longer = model.compiled.program
    for count in (1, 2):
        shorter = longer.copy()
        del shorter.graph.ops[-count:]
        with pytest.raises(poptorch.Error, match=r"file continues with '.+' where this"):
            saving.check_same_program(ExecutableFile(path), shorter)
    model.destroy()
    train(Net()).compileAndExport(path, *batch())
    file = ExecutableFile(path)
    longer.graph.ops.append(longer.graph.ops[-1])
    with pytest.raises(poptorch.Error, match=r"The file ends where this model continues with '.+'"):
        saving.check_same_program(file, longer)


def test_the_mode_has_to_be_the_one_of_the_export(tmp_path):
    class Noisy(Net):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x, y=None):
            return super().forward(self.dropout(x), y)

    path, _ = exported(tmp_path, Noisy())
    with pytest.raises(poptorch.Error, match=r"mode \(train or eval\)"):
        train(Noisy().eval()).loadExecutable(path)
    train(Noisy()).loadExecutable(path)


def test_a_compiled_model_loads_nothing(tmp_path):
    path, model = exported(tmp_path)
    with pytest.raises(poptorch.Error, match="compiled already"):
        model.loadExecutable(path)
    model.destroy()
    model.loadExecutable(path)
    model(*batch())


def test_the_lines_of_the_code_do_not_count(tmp_path):
    def first(x):
        return torch.relu(x) + 1

    def second(x):
        # Another line of code, but the same computation.
        return torch.relu(x) + 1

    infer(Function(first)).compileAndExport(tmp_path / "file", torch.ones(2))
    model = infer(Function(second))
    model.loadExecutable(tmp_path / "file")
    assert torch.equal(model(torch.ones(2)), torch.tensor([2.0, 2.0]))


# --- What a file cannot hold --------------------------------------------------


class Custom(dict):
    pass


def test_containers_of_own_classes_can_be_exported_and_not_loaded(tmp_path):
    def forward(x):
        return Custom(out=x + 1)

    infer(Function(forward)).compileAndExport(tmp_path / "file", torch.ones(2))
    model = infer(Function(forward))
    model.loadExecutable(tmp_path / "file")
    result = model(torch.ones(2))
    assert type(result) is Custom
    assert torch.equal(result["out"], torch.tensor([2.0, 2.0]))
    with pytest.raises(poptorch.Error, match=r"What forward returns holds a .*Custom"):
        poptorch.load(tmp_path / "file")


def test_arguments_that_are_more_than_data_can_be_exported_and_not_loaded(tmp_path):
    def forward(x, function):
        return function(x)

    infer(Function(forward)).compileAndExport(tmp_path / "file", torch.ones(2), torch.relu)
    for load in (infer(Function(forward)).loadExecutable, poptorch.load):
        with pytest.raises(poptorch.Error, match="arguments holds a"):
            load(tmp_path / "file")


# --- Other machines -----------------------------------------------------------

OTHER = """
import sys, torch
import popsim_torch as poptorch
model = poptorch.load(sys.argv[1])
torch.manual_seed(0)
x, y = torch.randn(8, 64), torch.randint(0, 3, (8,))
for _ in range(3):
    _, loss = model(x, y)
print(float(loss), poptorch.build_info().target)
"""


@pytest.mark.parametrize("target", _C.usable_targets()[:1])
def test_a_file_runs_on_a_lower_processor(tmp_path, target):
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))

        def forward(self, x, y):
            out = self.body(x)
            return out, nn.functional.cross_entropy(out, y)

    net = Large()
    model = poptorch.trainingModel(
        net, make_options(), poptorch.optim.Adam(net.parameters(), lr=0.01)
    )
    torch.manual_seed(0)
    x, y = torch.randn(8, 64), torch.randint(0, 3, (8,))
    model.compileAndExport(tmp_path / "file", x, y)
    for _ in range(3):
        _, loss = model(x, y)
    held = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    environment = {name: value for name, value in os.environ.items() if name not in held}
    result = subprocess.run(
        [sys.executable, "-c", OTHER, str(tmp_path / "file")],
        cwd=Path(poptorch.__file__).parents[1],
        env={**environment, "POPSIM_CPU": target},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    other, name = result.stdout.split()
    assert name == target
    assert float(other) == pytest.approx(float(loss), rel=1e-4)


# --- POPTORCH_EXPORT_PROTO_FILE -----------------------------------------------


def test_the_graph_is_written_as_text(tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(tmp_path / "new" / "graph.txt"))
    model = infer(Net())
    model.compile(batch()[0])
    assert (tmp_path / "new" / "graph.txt").read_text() == model.program()


def test_a_path_without_an_extension_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(tmp_path / "new"))
    infer(Net()).compile(batch()[0])
    assert "Gemm" in (tmp_path / "new" / "model.proto").read_text()


def test_a_graph_file_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(tmp_path / "file" / "graph.txt"))
    with pytest.raises(poptorch.Error, match="POPTORCH_EXPORT_PROTO_FILE"):
        infer(Net()).compile(batch()[0])
