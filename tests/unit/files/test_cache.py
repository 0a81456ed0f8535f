"""Programs of earlier compilations: found again, always checked, and never an obstacle."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.executor import compile as compile_path
from popsim_torch.files.container import read_sections, write_sections
from tests.golden.test_programs import CASES, WithLoss
from tests.options import make_options
from tests.unit.executor.nets import Function, Net, batch


@pytest.fixture
def made(monkeypatch):
    """Count the programs that are compiled instead of found."""
    calls = []
    real = compile_path._state_program

    def count(*args):
        calls.append(args)
        return real(*args)

    monkeypatch.setattr(compile_path, "_state_program", count)
    return calls


def cached(folder, options=None):
    return (options or make_options(seed=1)).enableExecutableCaching(folder)


def trained(net, folder, options=None, lr=0.1):
    """Return the weights after two calls."""
    torch.manual_seed(5)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=lr)
    model = poptorch.trainingModel(net, cached(folder, options), optimizer)
    for _ in range(2):
        model(*batch())
    return {name: value.clone() for name, value in net.state_dict().items()}


def fresh(kind=Net):
    torch.manual_seed(3)
    return kind()


def test_a_second_compilation_finds_the_program(tmp_path, made):
    folder = tmp_path / "new" / "folder"
    first = trained(fresh(), folder)
    assert len(os.listdir(folder)) == 1
    second = trained(fresh(), folder)
    assert len(made) == 1
    assert len(os.listdir(folder)) == 1
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_results_are_those_without_a_cache(tmp_path):
    trained(fresh(), tmp_path)
    found, without = trained(fresh(), tmp_path), trained(fresh(), None)
    assert all(torch.equal(found[name], without[name]) for name in found)


def test_weights_and_learning_rates_are_not_part_of_the_key(tmp_path, made):
    trained(fresh(), tmp_path)
    other = Net()
    before = trained(other, tmp_path, lr=0.2)
    assert len(made) == 1
    without = Net()
    without.load_state_dict(before)
    assert torch.equal(
        trained(other, tmp_path, lr=0.3)["fc1.weight"], trained(without, None, lr=0.3)["fc1.weight"]
    )


def looped(net, folder, enqueues=False):
    """Return the weights after two calls of a training loop."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    infeed, outfeed = poptorch.InfeedQueue([batch()] * 6), poptorch.OutfeedQueue()

    @poptorch.function(options=cached(folder))
    def train():
        def step(x, labels):
            loss = net(x, labels)[1]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if enqueues:
                outfeed.enqueue(loss)

        poptorch.repeat(3, step, infeed=infeed)

    train()
    train()
    if enqueues:
        assert len(outfeed.dequeue()) == 6
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize("enqueues", [False, True])
def test_loops_are_found_too(tmp_path, made, enqueues):
    first, second = (looped(fresh(), tmp_path, enqueues) for _ in range(2))
    assert len(made) == 1 and len(os.listdir(tmp_path)) == 1
    looped(fresh(), tmp_path, not enqueues)
    assert len(made) == 2
    without = looped(fresh(), None)
    assert all(torch.equal(first[name], without[name]) for name in first)
    assert all(torch.equal(second[name], without[name]) for name in second)


def captured(net, folder, filters, mode=poptorch.OutfeedOptimizerMode.AFTER_COMPUTE):
    """Return the gradients that a wrapped optimizer enqueues; a queue gets the activations."""
    gradients, hidden = poptorch.MaybeOutfeedQueue(filters=filters), poptorch.OutfeedQueue()
    optimizer = poptorch.OutfeedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), gradients, mode
    )

    def forward(x, labels):
        result, loss = net(x, labels)
        hidden.enqueue({"result": result})
        return result, loss

    options = cached(folder)
    options.Training.gradientAccumulation(2)
    model = Function(forward)
    model.net = net
    x, labels = batch()
    trainer = poptorch.trainingModel(model, options, optimizer)
    trainer(torch.cat([x, x + 1]), torch.cat([labels, labels]))
    assert hidden.dequeue()["result"].shape[0] == 2
    trainer.destroy()
    return gradients.dequeue()


def test_gradients_that_are_enqueued_are_part_of_the_key(tmp_path, made):
    settings = [
        (["fc1"],),
        (["fc2"],),
        (["fc1"], poptorch.OutfeedOptimizerMode.BEFORE_APPLY),
    ]
    without = [captured(fresh(), None, *one) for one in settings]
    made.clear()
    for _ in range(2):
        for one, expected in zip(settings, without, strict=True):
            found = captured(fresh(), tmp_path, *one)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[key], expected[key]) for key in found)
    assert len(made) == 3


def test_no_files_without_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained(fresh(), None)
    assert os.listdir(tmp_path) == []


def test_the_environment_turns_it_on(tmp_path, monkeypatch, made):
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        net = fresh()
        poptorch.inferenceModel(net, make_options()).compile(batch()[0])
    assert len(made) == 1
    assert len(os.listdir(tmp_path)) == 1


class Wider(nn.Module):
    """A model whose program depends on more than its shapes."""

    def __init__(self, factor=2.0, table=(1.0, 2.0), count=3):
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.factor = factor
        self.table = torch.tensor(table)
        self.register_buffer("count", torch.tensor(count))

    def forward(self, x):
        return self.fc(x) * self.factor + self.table.to("ipu") + self.count


def infer_with(folder, net, options=None):
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.fill_(0.5)
    model = poptorch.inferenceModel(net, cached(folder, options))
    x = torch.randn(4, 4)
    expected = net.fc(x) * net.factor + net.table + net.count
    torch.testing.assert_close(model(x), expected)


def test_what_changes_the_program_makes_another_file(tmp_path, made):
    variants = [
        lambda: Wider(),
        lambda: Wider(factor=3.0),
        lambda: Wider(table=(1.0, 4.0)),
        lambda: Wider(count=4),
    ]
    for _ in range(2):
        for make in variants:
            infer_with(tmp_path, make())
    assert len(made) == len(os.listdir(tmp_path)) == len(variants)


def test_options_that_change_the_program_make_another_file(tmp_path, made):
    def options(index):
        chosen = make_options()
        if index == 1:
            chosen.anchorTensor("a", "input")
        if index == 2:
            chosen.deviceIterations(2)
        if index == 3:
            chosen.outputMode(poptorch.OutputMode.Final)
        if index == 4:
            chosen.outputMode(poptorch.OutputMode.Sum)
        return cached(tmp_path, chosen)

    for _ in range(2):
        for index in range(5):
            poptorch.inferenceModel(fresh(), options(index)).compile(batch()[0])
    assert len(made) == len(os.listdir(tmp_path)) == 5


def test_a_buffer_of_integers_that_is_handed_on_is_part_of_the_key(tmp_path):
    class HandsOn(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.register_buffer("count", torch.tensor([count]))

        def forward(self, x):
            return x + 1, self.count

    for count in (3, 4):
        model = poptorch.inferenceModel(HandsOn(count), cached(tmp_path))
        assert model(torch.ones(2))[1].tolist() == [count]


@pytest.mark.parametrize("name", CASES)
def test_programs_of_all_kinds_are_found_and_the_same(name, tmp_path, made):
    body, shape, options, optimizer = CASES[name]
    texts = []
    for folder in (tmp_path, tmp_path, None):
        module, chosen = WithLoss(body()), options()
        if folder:
            chosen.enableExecutableCaching(folder)
        samples = 2 * chosen.device_iterations * chosen.Training.gradient_accumulation
        model = poptorch.trainingModel(module, chosen, optimizer(module))
        model.compile(torch.zeros(samples, *shape), torch.zeros(samples, dtype=torch.long))
        texts.append((model.program(), model.program(host=True)))
    assert len(made) == 2
    assert texts[0] == texts[1] == texts[2]


# --- What is wrong with a cache -----------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:999],
        lambda data: b"text",
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    ],
)
def test_a_damaged_file_is_ignored_and_written_anew(tmp_path, made, caplog, damage):
    first = trained(fresh(), tmp_path)
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    path.write_bytes(damage(good))
    second = trained(fresh(), tmp_path)
    assert len(made) == 2
    assert "ignored and written again" in caplog.text
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert path.read_bytes() == good
    trained(fresh(), tmp_path)
    assert len(made) == 2


def poison(path, change):
    """Change the program in a file, as an attacker would who knows the format."""
    sections = read_sections(path, "a cached program")
    data = json.loads(sections["program"])
    change(data["Program"])
    sections["program"] = json.dumps(data).encode()
    write_sections(path, "a cached program", sections)


def other_shapes(program):
    for tensor in program["graph"]["Graph"]["tensors"]:
        if tensor["Tensor"]["shape"] == {"tuple": [4, 2]}:
            tensor["Tensor"]["shape"] = {"tuple": [2, 4]}


def other_input(program):
    tensors = (tensor["Tensor"] for tensor in program["graph"]["Graph"]["tensors"])
    next(t for t in tensors if t["kind"] == {"enum": ["TensorKind", "INPUT"]})["name"] = "y"
    program["graph"]["Graph"]["names"] = {"dict": []}
    program["graph"]["Graph"]["tensors"].append(
        {"Tensor": {"id": len(program["graph"]["Graph"]["tensors"]), "kind": INPUT, **FLOAT_4}}
    )


INPUT = {"enum": ["TensorKind", "INPUT"]}
FLOAT_4 = {"dtype": {"dtype": "float32"}, "shape": {"tuple": [4]}, "strides": {"tuple": [1]}}


def no_outputs(program):
    program["outputs"] = []


def other_operator(program):
    for op in program["graph"]["Graph"]["ops"]:
        op["Op"]["attributes"]["dict"] = [
            [k, "aten::from_file" if k == "operator" else v]
            for k, v in op["Op"]["attributes"]["dict"]
        ]


def no_ops(program):
    program["graph"]["Graph"]["ops"] = []


@pytest.mark.parametrize(
    "change",
    [other_shapes, other_input, no_outputs, other_operator, no_ops],
    ids=lambda f: f.__name__,
)
def test_a_program_that_cannot_be_used_is_made_anew(tmp_path, made, caplog, change):
    def run():
        model = poptorch.inferenceModel(Function(torch.erfinv), cached(tmp_path))
        return model(torch.tensor([[0.0, 0.5]] * 4))

    expected = run()
    (path,) = tmp_path.iterdir()
    good = path.read_bytes()
    poison(path, change)
    assert torch.equal(run(), expected)
    assert len(made) == 2
    assert "written again: " in caplog.text
    assert path.read_bytes() == good
    assert torch.equal(run(), expected)
    assert len(made) == 2


def test_errors_of_the_model_are_not_those_of_the_cache(tmp_path, made, caplog, monkeypatch):
    def fail(*_, **__):
        raise OSError("no more memory")

    monkeypatch.setattr(compile_path, "_state_program", fail)
    with pytest.raises(OSError, match="no more memory"):
        trained(fresh(), tmp_path)
    monkeypatch.undo()
    trained(fresh(), tmp_path)
    monkeypatch.setattr(compile_path, "fit_to_host", fail)
    with pytest.raises(OSError, match="no more memory"):
        trained(fresh(), tmp_path)
    assert "is ignored and written again" in caplog.text
    assert "The executable cache" not in caplog.text


@pytest.mark.timeout(60)
def test_a_pipe_in_the_place_of_a_file_is_a_warning(tmp_path, made, caplog):
    trained(fresh(), tmp_path)
    (path,) = tmp_path.iterdir()
    path.unlink()
    os.mkfifo(path)
    trained(fresh(), tmp_path)
    assert len(made) == 2
    assert "not a regular file" in caplog.text
    assert path.is_fifo()


def test_a_folder_that_no_system_has_is_a_warning(caplog):
    trained(fresh(), "a\0b")
    assert "cannot be used" in caplog.text


def test_the_file_of_another_program_is_not_believed(tmp_path, made):
    infer_with(tmp_path, Wider())
    (one,) = tmp_path.iterdir()
    infer_with(tmp_path, Wider(factor=3.0))
    (other,) = set(tmp_path.iterdir()) - {one}
    other.write_bytes(one.read_bytes())
    infer_with(tmp_path, Wider(factor=3.0))
    assert len(made) == 3


def test_a_place_where_no_folder_can_be_is_a_warning(tmp_path, caplog):
    file = tmp_path / "file"
    file.write_text("")
    trained(fresh(), file)
    assert "cannot be used" in caplog.text


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise poptorch.Error("No space left on device")

    monkeypatch.setattr("popsim_torch.files.cache.write_sections", fail)
    trained(fresh(), tmp_path)
    assert "is not written to the executable cache" in caplog.text
    assert os.listdir(tmp_path) == []


def test_what_killed_writers_left_is_removed(tmp_path):
    (tmp_path / ".a-cached-program.1234.writing").write_bytes(b"half")
    (tmp_path / "of_the_user.txt").write_bytes(b"whole")
    trained(fresh(), tmp_path)
    names = set(os.listdir(tmp_path))
    assert "of_the_user.txt" in names
    assert len(names) == 2


def test_an_error_of_the_compilation_leaves_nothing_and_no_lock(tmp_path):
    options = make_options()
    options.anchorTensor("a", "no such tensor")
    for _ in range(2):
        model = poptorch.inferenceModel(fresh(), cached(tmp_path, options))
        with pytest.raises(poptorch.Error, match="no tensor named"):
            model.compile(batch()[0])
        options = options.clone()
    assert os.listdir(tmp_path) == []
    trained(fresh(), tmp_path)
    assert len(os.listdir(tmp_path)) == 1


# --- Several processes --------------------------------------------------------

MAKER = """
import sys, time
import popsim_torch as poptorch
from popsim_torch.executor import compile as compile_path
from tests.unit.files.test_cache import infer_with, Wider
real = compile_path._state_program
def make(*args):
    print("made", flush=True)
    time.sleep(0.5)
    return real(*args)
compile_path._state_program = make
infer_with(sys.argv[1], Wider())
"""

HOLDER = """
import fcntl, os, sys, time
fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(100)
"""


@contextlib.contextmanager
def process(code, folder):
    """Start a process and wait for its first output; it ends with the block."""
    started = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=Path(poptorch.__file__).parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert started.stdout.readline()
        yield started
    finally:
        started.kill()
        started.communicate()


def test_of_two_processes_one_makes_the_program(tmp_path, made):
    with process(MAKER, tmp_path) as other:
        infer_with(tmp_path, Wider())
        assert other.wait(timeout=60) == 0
    assert made == []
    assert len(os.listdir(tmp_path)) == 1


def test_a_holder_of_the_lock_that_is_killed_is_in_nobodys_way(tmp_path, made, caplog):
    caplog.set_level("DEBUG", logger="poptorch:cpp")
    with process(HOLDER, tmp_path) as holder:
        killer = threading.Timer(0.3, holder.kill)
        killer.start()
        infer_with(tmp_path, Wider())
        killer.join()
    assert "locked by another process" in caplog.text
    assert len(made) == 1
    assert len(os.listdir(tmp_path)) == 1
