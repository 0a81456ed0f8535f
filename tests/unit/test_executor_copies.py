"""Copies of executors: ``copy.copy``, ``copy.deepcopy`` and ``torch.save``."""

import copy
import gc
import io

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 3)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y=None):
        x = self.out(nn.functional.dropout(self.norm(self.fc(x)), 0.3, self.training))
        return x if y is None else (x, self.loss(x, y))


def train(net, optimizer=None):
    optimizer = optimizer or poptorch.optim.Adam(net.parameters(), lr=0.125)
    return poptorch.trainingModel(net, make_options(d=2, seed=11), optimizer)


def batch():
    return torch.randn(12, 4), torch.randint(0, 3, (12,))


def save_and_load(executor):
    file = io.BytesIO()
    torch.save(executor, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


copies = pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, save_and_load], ids=["deepcopy", "torch.save"]
)


def assert_equal_weights(one, other):
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert torch.equal(value, theirs[name]), name


def test_dropping_a_shallow_copy_leaves_the_model_in_training():
    torch.manual_seed(2)
    net, other = Net(), Net()
    other.load_state_dict(net.state_dict())
    training, reference = train(net), train(other)
    first, second = batch(), batch()
    training(*first)
    shared = copy.copy(training)
    assert shared.isCompiled()
    shared(*second)
    del shared
    gc.collect()
    reference(*first)
    reference(*second)
    assert_equal_weights(net, other)
    before = net.fc.weight.clone()
    training(*first)
    assert not torch.equal(net.fc.weight, before)


def test_a_shallow_copy_outlives_the_name_it_was_made_from():
    net = Net()
    training = train(net)
    training(*batch())
    shared = copy.copy(training)
    del training
    gc.collect()
    before = net.fc.weight.clone()
    shared(*batch())
    assert not torch.equal(net.fc.weight, before)


@copies
@pytest.mark.parametrize("calls", [0, 2])
def test_a_copy_goes_on_like_the_original(duplicate, calls):
    """Weights, running statistics, optimizer state and random numbers are the original's."""
    net = Net()
    training = train(net)
    batches = [batch() for _ in range(calls + 2)]
    for inputs in batches[:calls]:
        training(*inputs)
    twin = duplicate(training)
    assert isinstance(twin, poptorch.PoplarExecutor)
    assert (twin.training_mode, twin.isCompiled()) == (True, False)
    assert training.isCompiled() == bool(calls)
    for inputs in batches[calls:]:
        ours, theirs = training(*inputs), twin(*inputs)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert_equal_weights(net, twin.model)


@copies
def test_a_copy_is_independent(duplicate):
    net = Net()
    training = train(net)
    training(*batch())
    twin = duplicate(training)
    assert twin.model is not net
    assert repr(twin.options) == repr(training.options)
    assert twin.options is not training.options
    with pytest.raises(AttributeError, match="frozen"):
        twin.options.deviceIterations(3)
    mine, theirs = (
        {key: value.clone() for key, value in model.state_dict().items()}
        for model in (net, twin.model)
    )
    twin(*batch())
    for name in ("fc.weight", "norm.running_mean"):
        assert torch.equal(net.state_dict()[name], mine[name])
        assert not torch.equal(twin.state_dict()[name], theirs[name])
    twin.destroy()
    del twin
    training(*batch())
    assert not torch.equal(net.fc.weight, mine["fc.weight"])


@copies
def test_a_copy_keeps_the_optimizer_of_the_last_call(duplicate):
    """Values changed without setOptimizer affect neither the copy nor the original."""
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.125)
    training = train(net, optimizer)
    optimizer.param_groups[0]["lr"] = 100.0
    twin = duplicate(training)
    inputs = batch()
    training(*inputs)
    twin(*inputs)
    assert_equal_weights(net, twin.model)
    twin.setOptimizer(torch.optim.SGD(twin.model.parameters(), lr=0.25))
    twin(*inputs)


@copies
@pytest.mark.parametrize("compiled", [False, True])
def test_copies_of_inference(duplicate, compiled):
    net = Net().eval()
    inference = poptorch.inferenceModel(net, make_options(d=2, seed=11))
    x, _ = batch()
    if compiled:
        inference(x)
    twin = duplicate(inference)
    assert isinstance(twin, poptorch.PoplarExecutor)
    assert not twin.training_mode
    assert torch.equal(twin(x), inference(x))
    with torch.no_grad():
        twin.model.out.bias += 1
    twin.copyWeightsToDevice()
    torch.testing.assert_close(twin(x), inference(x) + 1)


def test_executors_copied_together_stay_connected():
    net = Net()
    training = train(net)
    inference = poptorch.inferenceModel(training, make_options(d=2, seed=11))
    training(*batch())
    trainer, tester = copy.deepcopy((training, inference))
    assert tester.model.fc.weight is trainer.model.fc.weight
    x, y = batch()
    before = tester(x)
    trainer(x, y)
    assert not torch.equal(tester(x), before)
    assert torch.equal(inference(x), before)


def test_a_model_that_cannot_be_copied_leaves_the_executor_usable():
    net = Net()
    net.lock = (i for i in ())
    training = train(net)
    training(*batch())
    for duplicate in (copy.deepcopy, save_and_load):
        with pytest.raises((TypeError, AttributeError), match="generator"):
            duplicate(training)
    gc.collect()
    before = net.fc.weight.clone()
    training(*batch())
    assert not torch.equal(net.fc.weight, before)


def test_an_executor_is_no_container_of_the_models_kind():
    executor = poptorch.inferenceModel(nn.Sequential(nn.Linear(2, 2)), make_options(d=2, seed=11))
    with pytest.raises(TypeError, match="has no len"):
        len(executor)
    with pytest.raises(AttributeError, match="'PoplarExecutor' object has no attribute '__len__'"):
        executor.__len__()


def test_an_executor_lives_for_as_long_as_one_of_its_methods_runs():
    def compiled():
        model = poptorch.trainingModel(Net(), make_options())
        model.compile(*batch())
        return model

    assert "Gradient___fc.weight" in compiled().getTensorNames()
    assert compiled().compile_log().seconds > 0
    assert compiled().getLatency.__self__.isCompiled()
