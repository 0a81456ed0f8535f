"""One executor trains a model, and another executor runs it."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.executor.nets import LR, TOLERANCE, Net, batch, infer, train


@pytest.mark.parametrize("inference_first", [True, False])
@pytest.mark.parametrize("compile_first", [True, False])
def test_inference_sees_what_was_trained(inference_first, compile_first):
    net = Net()
    x, y = batch()
    if inference_first:
        inference = infer(net)
        training = train(net)
    else:
        training = train(net)
        inference = infer(training)
    if compile_first:
        inference.compile(x)
    before = inference(x) if compile_first else None
    for _ in range(2):
        training(x, y)
        after = inference(x)
        torch.testing.assert_close(after, net(x).detach(), **TOLERANCE)
        assert before is None or not torch.equal(after, before)
        before = after


def test_several_inference_executors_follow_one_training():
    net = Net()
    x, y = batch()
    first, training, second = infer(net), train(net), infer(net)
    for _ in range(2):
        training(x, y)
        assert torch.equal(first(x), second(x))
        torch.testing.assert_close(first(x), net(x).detach(), **TOLERANCE)


def test_inference_uploads_once_per_training_call(implicit_copies):
    net = Net()
    x, y = batch()
    training, inference = train(net), infer(net)
    training(x, y)
    for _ in range(3):
        inference(x)
    assert implicit_copies("Host") == 1
    uploads = implicit_copies("Device")
    assert uploads <= 1
    training(x, y)
    training(x, y)
    for _ in range(3):
        inference(x)
    assert implicit_copies("Host") == 2
    assert implicit_copies("Device") == uploads + 1


def test_inference_of_a_part_of_the_trained_model():
    net = Net()
    x, y = batch()
    part = infer(net.fc1)
    before = part(x)
    train(net)(x, y)
    training = train(net)
    training(x, y)
    after = part(x)
    assert not torch.equal(before, after)
    expected = nn.functional.linear(x, net.fc1.weight, net.fc1.bias)
    torch.testing.assert_close(after, expected.detach(), **TOLERANCE)


class Pair(nn.Module):
    """A model that trains one of two layers by means of the other one."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x):
        return poptorch.identity_loss(self.second(torch.tanh(self.first(x))), "sum")


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
def test_two_training_executors_leave_what_each_trained(order):
    layers = nn.Linear(4, 4), nn.Linear(4, 2)
    twins = copy.deepcopy(layers)
    x, _ = batch()
    executors = []
    for i in (0, 1):
        net = Pair(*layers)
        layers[1 - i].requires_grad_(False)
        executors.append(train(net, optimizer=poptorch.optim.SGD(layers[i].parameters(), lr=LR)))
        executors[i].compile(x)
        layers[1 - i].requires_grad_(True)
        # Both start with the same weights, and neither sees changes of the other.
        pair = Pair(*copy.deepcopy(twins))
        pair(x).backward()
        for ours, theirs in zip(
            twins[i].parameters(), (pair.first, pair.second)[i].parameters(), strict=True
        ):
            ours.grad = theirs.grad
    for i in order:
        executors[i](x)
    for layer, twin in zip(layers, twins, strict=True):
        for ours, theirs in zip(layer.parameters(), twin.parameters(), strict=True):
            expected = theirs.detach() - LR * theirs.grad
            torch.testing.assert_close(ours.detach(), expected, **TOLERANCE)


def test_a_destroyed_training_is_no_longer_followed():
    net = Net()
    x, y = batch()
    training, inference = train(net), infer(net)
    training(x, y)
    before = inference(x)
    training(x, y)
    training.destroy()
    assert torch.equal(inference(x), before)
    inference.copyWeightsToDevice()
    torch.testing.assert_close(inference(x), net(x).detach(), **TOLERANCE)


class Task(torch.nn.Module):
    def __init__(self, trunk):
        super().__init__()
        self.trunk = trunk
        self.head = torch.nn.Linear(3, 2)

    def forward(self, x):
        return torch.nn.functional.mse_loss(self.head(self.trunk(x)), torch.ones(4, 2))


def tasks():
    trunk = torch.nn.Linear(3, 3)
    models = [Task(trunk), Task(trunk)]
    return models, [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]


def test_two_training_models_with_a_common_part_are_warned_of(caplog):
    models, optimizers = tasks()
    x = torch.randn(4, 3)
    first = poptorch.trainingModel(models[0], optimizer=optimizers[0])
    first(x)
    assert "another training model" not in caplog.text
    second = poptorch.trainingModel(models[1], optimizer=optimizers[1])
    second(x)
    first(x)
    assert caplog.text.count("another training model has these parameters too: trunk.weight") == 1


def test_the_copies_of_that_warning_give_eager_pytorchs_weights():
    models, optimizers = tasks()
    eager = copy.deepcopy(models)
    rivals = [torch.optim.SGD(model.parameters(), lr=0.1) for model in eager]
    executors = [
        poptorch.trainingModel(model, optimizer=optimizer)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    x = torch.randn(4, 3)
    for step in range(6):
        place, other = step % 2, 1 - step % 2
        loss = executors[place](x)
        executors[place].copyWeightsToHost()
        if executors[other].isCompiled():
            executors[other].copyWeightsToDevice()
        rivals[place].zero_grad()
        expected = eager[place](x)
        expected.backward()
        rivals[place].step()
        torch.testing.assert_close(loss, expected.detach())


def test_a_model_that_is_trained_after_another_is_not_warned_of(caplog):
    models, optimizers = tasks()
    x = torch.randn(4, 3)
    for model, optimizer in zip(models, optimizers, strict=True):
        executor = poptorch.trainingModel(model, optimizer=optimizer)
        executor(x)
        executor.destroy()
    assert "another training model" not in caplog.text
