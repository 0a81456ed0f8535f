"""Recording a training loop of PyTorch, and comparing it with a program."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import popsim_torch as poptorch
from popsim_torch.errors import UsageTypeError
from popsim_torch.records import Run, compare, eager_record
from popsim_torch.records.pairs import pair_tensors
from popsim_torch.statistics import Moments, Sample
from tests.unit.records.runs import USUAL

LR = 0.1
STEPS = 3


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels):
        logits = self.fc2(self.act(self.fc1(x)))
        return logits, self.loss(logits, labels)


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.drop = nn.Dropout(0.0)
        self.flat = nn.Flatten()
        self.head = nn.Linear(36, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, labels):
        logits = self.head(self.flat(self.drop(self.body(x))))
        return logits, self.loss(logits, labels)


class Rnn(nn.Module):
    """Has a module with several outputs, one without ops of its own, and ops outside of modules."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.LayerNorm(6), nn.Linear(6, 6)])
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x) + x
        logits = self.head(self.rnn(x)[0][:, -1].relu())
        return logits, nn.functional.cross_entropy(logits, labels)


MODELS = {"mlp": (Mlp, (4, 6)), "cnn": (Cnn, (4, 1, 8, 8)), "rnn": (Rnn, (4, 3, 6))}


def batches(shape, steps=STEPS):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x = torch.randn(*shape, generator=generator)
        yield x, torch.randint(3, shape[:1], generator=generator)


def train(model, path, shape, *requests, micro_batches=1, steps=STEPS, **more):
    """Train a model with PyTorch, recorded."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with eager_record(model, path, *requests, optimizer=optimizer, **more):
        for i, (x, labels) in enumerate(batches(shape, steps * micro_batches)):
            model(x, labels)[1].backward()
            if (i + 1) % micro_batches == 0:
                optimizer.step()
                optimizer.zero_grad()
    return Run(path)


def run_program(model, path, shape):
    """Train a model as a program, recorded."""
    optimizer = poptorch.optim.SGD(model.parameters(), lr=LR)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    training.record(path)
    for batch in batches(shape):
        training(*batch)
    training.close_sinks()
    return training, Run(path)


@pytest.mark.parametrize("kind", MODELS)
def test_a_program_and_pytorch_agree(kind, tmp_path):
    make, shape = MODELS[kind]
    model = make()
    eager = train(copy.deepcopy(model), tmp_path / "eager", shape, *USUAL)
    training, run = run_program(model, tmp_path / "program", shape)
    found = compare(run, eager, tolerance=1e-4)
    assert found.equal, str(found)
    # The states that an LSTM returns beside its output have no counterpart.
    assert found.only_in_b == (("rnn[1]", "rnn[2]") if kind == "rnn" else ())
    pairs = pair_tensors(eager.details, run.details)
    assert set(pairs.values()) <= set(training.getTensorNames())
    assert {name for name in pairs if not name.startswith("Gradient___")} >= {
        name for name in eager.names if "UpdatedVar" in name or name == "input"
    }


@pytest.mark.parametrize("kind", MODELS)
def test_with_an_executor_the_names_are_those_of_the_program(kind, tmp_path):
    make, shape = MODELS[kind]
    model = make()
    copied = copy.deepcopy(model)
    training = poptorch.trainingModel(model)
    training.compile(*next(batches(shape)))
    run = train(copied, tmp_path / "a", shape, like=training)
    known = set(training.getTensorNames())
    assert {name for name in run.names if not name.startswith("rnn[")} <= known
    outputs = {"mlp": ["fc1/Gemm:0", "act/Relu:0", "fc2/Gemm:0", "loss/Nll:0"]}
    outputs["rnn"] = ["layers/0/GroupNormalization:0", "head/Gemm:0", "Nll:0"]
    outputs["cnn"] = ["body/0/Conv:0", "body/2/Relu:0", "body/3/MaxPool:0", "head/Gemm:0"]
    for name in outputs[kind]:
        assert name in run.names and f"Gradient___{name}" in run.names


def test_a_batch_of_as_many_samples_as_features(tmp_path):
    """The transposed weight has the shape of the output, and is no output."""
    model = Mlp()
    shape = (6, 6)
    eager = train(copy.deepcopy(model), tmp_path / "eager", shape, *USUAL)
    _, run = run_program(model, tmp_path / "program", shape)
    assert pair_tensors(eager.details, run.details)["fc1"] == "fc1/Gemm:0"
    assert compare(run, eager, tolerance=1e-4).equal


def test_a_change_is_found_at_its_module(tmp_path):
    model = Mlp()
    changed = copy.deepcopy(model)
    changed.act = nn.LeakyReLU(0.01)
    eager = train(changed, tmp_path / "eager", (4, 6), *USUAL)
    _, run = run_program(model, tmp_path / "program", (4, 6))
    first = compare(run, eager, tolerance=1e-4).first
    assert (first.step, first.name, first.other.name) == (0, "act/Relu:0", "act")
    assert first.module == "act"
    first = compare(eager, run, tolerance=1e-4).first
    assert (first.step, first.name, first.other.name) == (0, "act", "act/Relu:0")


def test_the_same_training_twice_is_equal_and_a_line_changes_it(tmp_path):
    model = Mlp()
    runs = [train(copy.deepcopy(model), tmp_path / name, (4, 6)) for name in ("a", "b")]
    assert compare(*runs).equal and compare(*runs).by_value == 0
    changed = copy.deepcopy(model)
    changed.fc2.weight.data[0, 0] += 1e-3
    found = compare(runs[0], train(changed, tmp_path / "c", (4, 6)))
    assert (found.first.step, found.first.name) == (0, "fc2")


def test_what_is_recorded(tmp_path):
    run = train(Mlp(), tmp_path / "a", (4, 6), Moments())
    outputs = ["fc1", "act", "fc2", "loss"]
    weights = ["fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"]
    assert run.names[:6] == ["input", "input/1", *outputs]
    assert set(run.names) == {
        *("input", "input/1", *outputs),
        *(f"Gradient___{name}" for name in (*outputs, *weights)),
        *(f"UpdatedVar___{name}" for name in weights),
    }
    assert run.steps == [0, 1, 2]
    places = {one.name: one.micro_batch for one in run.records(step=1)}
    assert places["fc1"] == places["Gradient___fc1.bias"] == 0
    assert places["UpdatedVar___fc1.bias"] is None
    details = run.details
    assert details["fc1"].shape == (4, 5) and details["fc1"].module == "fc1"
    assert details["Gradient___fc1.weight"].dtype == torch.float32
    assert run.records(0, "fc1")[0].statistics.samples is None


def test_values_are_those_of_the_training(tmp_path):
    model = Mlp()
    copied = copy.deepcopy(model)
    run = train(copied, tmp_path / "a", (4, 6), Sample(100), steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, labels = next(batches((4, 6)))
    hidden = model.fc1(x)
    hidden.retain_grad()
    loss = model.loss(model.fc2(model.act(hidden)), labels)
    loss.backward()
    optimizer.step()
    for name, expected in {
        "input": x,
        "fc1": hidden,
        "Gradient___fc1": hidden.grad,
        "Gradient___fc1.weight": model.fc1.weight.grad,
        "UpdatedVar___fc1.weight": model.fc1.weight,
    }.items():
        (record,) = run.records(name=name)
        found = record.statistics.samples.float()
        assert torch.equal(found, expected.detach().reshape(-1)), name
    # Recording changes no bit of the training.
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        assert torch.equal(one, other)


def test_micro_batches_have_gradients_of_their_own(tmp_path):
    model = Mlp()
    run = train(model, tmp_path / "a", (4, 6), Sample(100), micro_batches=3, steps=2)
    assert run.steps == [0, 1]
    assert [one.micro_batch for one in run.records(1, "Gradient___fc1.weight")] == [0, 1, 2]
    assert [one.micro_batch for one in run.records(1, "UpdatedVar___fc1.weight")] == [None]
    gradients = [one.statistics.samples for one in run.records(0, "Gradient___fc2.weight")]
    (before, after) = (
        run.records(step, "UpdatedVar___fc2.weight")[0].statistics.samples for step in (0, 1)
    )
    second = [one.statistics.samples for one in run.records(1, "Gradient___fc2.weight")]
    torch.testing.assert_close(before - after, LR * sum(second), rtol=1e-4, atol=1e-6)
    assert not torch.equal(gradients[0], gradients[1])


class Shared(nn.Module):
    """Calls a layer twice; has a passing module, an output of its own, and several results."""

    def __init__(self):
        super().__init__()
        self.fc, self.same, self.rnn = nn.Linear(4, 4), nn.Identity(), nn.LSTM(4, 4)

    def forward(self, x):
        hidden, (h, c) = self.rnn(self.fc(self.same(self.fc(x))))
        return {"loss": hidden.square().mean(), "extra": [h, c]}


def test_modules_that_are_called_twice_or_pass_on(tmp_path):
    model = Shared()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with eager_record(model, tmp_path / "a", Moments(), optimizer=optimizer):
        model(torch.randn(2, 3, 4))["loss"].backward()
        optimizer.step()
    run = Run(tmp_path / "a")
    forward = [name for name in run.names if "___" not in name]
    assert forward == ["input", "fc", "fc/1", "rnn", "rnn[1]", "rnn[2]", "(model)"]
    assert "Gradient___fc/1" in run.names and "Gradient___same" not in run.names


def test_without_an_optimizer_each_call_is_a_step(tmp_path):
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    meta = {"kind": "inference"}
    with eager_record(model, tmp_path / "a", Moments(), meta=meta), torch.inference_mode():
        for _ in range(3):
            model(torch.randn(4, 3))
    run = Run(tmp_path / "a")
    assert run.steps == [0, 1, 2] and run.names == ["input", "0", "1"]
    assert run.meta == {"kind": "inference"}


def test_a_validation_is_not_recorded(tmp_path):
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with eager_record(model, tmp_path / "a", Moments(), optimizer=optimizer):
        for batch in batches((4, 6)):
            model(*batch)[1].backward()
            optimizer.step()
            with torch.no_grad():
                model(*batch)
            model.fc1(batch[0])  # not a call of the model
    run = Run(tmp_path / "a")
    assert len(run.records(name="fc1")) == STEPS and "fc1/1" not in run.names


class Checkpointed(Mlp):
    def forward(self, x, labels):
        hidden = checkpoint(self.fc1, x, use_reentrant=False)
        return hidden, self.loss(self.fc2(hidden), labels)


def test_a_repeated_forward_in_the_backward_pass_is_not_another_call(tmp_path):
    run = train(Checkpointed(), tmp_path / "a", (4, 6), Moments())
    assert "fc1" in run.names and "fc1/1" not in run.names


def test_the_hooks_are_gone_afterwards(tmp_path):
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with pytest.raises(KeyError), eager_record(model, tmp_path / "a", optimizer=optimizer):
        model(*next(batches((4, 6))))
        raise KeyError
    run = Run(tmp_path / "a")
    assert run.state == "closed" and "fc1" in run.names  # the step that was begun
    before = len(run.records())
    model(*next(batches((4, 6))))[1].backward()
    optimizer.step()
    assert len(run.records()) == before
    assert not any(module._forward_hooks for module in model.modules())


def test_a_loop_without_steps_leaves_an_empty_run(tmp_path):
    with eager_record(Mlp(), tmp_path / "a"):
        pass
    assert Run(tmp_path / "a").steps == []


def test_mistakes(tmp_path):
    optimizer = torch.optim.SGD(Mlp().parameters(), lr=LR)
    for arguments, more, match in (
        ((torch.relu, tmp_path), {}, "the model is a builtin_function.* an nn.Module is needed"),
        ((Mlp(), tmp_path), {"optimizer": LR}, "the optimizer is a float"),
        ((Mlp(), tmp_path, optimizer), {}, "asks for no statistics. Pass poptorch.Moments"),
        ((Mlp(), tmp_path, Moments), {}, "asks for no statistics"),
    ):
        with pytest.raises(UsageTypeError, match=match), eager_record(*arguments, **more):
            pass
    assert list(tmp_path.iterdir()) == []
    train(Mlp(), tmp_path / "a", (4, 6))
    with pytest.raises(poptorch.Error, match=r"there is a run already"):
        train(Mlp(), tmp_path / "a", (4, 6))
