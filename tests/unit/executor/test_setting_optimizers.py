"""setOptimizer, and optimizers that know their executor."""

import copy

import torch

import popsim_torch as poptorch
from tests.unit.executor.nets import LR, Net, assert_same_weights, batch, eager_step, train


def test_set_optimizer_changes_values_without_compiling():
    net = Net()
    twin = copy.deepcopy(net)
    model = train(net)
    x, y = batch()
    model(x, y)
    program = model.compiled
    eager = torch.optim.SGD(twin.parameters(), lr=LR)
    eager_step(twin, eager, x, y)
    model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.5))
    eager.param_groups[0]["lr"] = 0.5
    model(x, y)
    eager_step(twin, eager, x, y)
    assert model.compiled is program
    assert_same_weights(net, twin)


def test_a_changed_group_counts_from_set_optimizer_on():
    net = Net()
    twin = copy.deepcopy(net)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=LR)
    model = train(net, optimizer=optimizer)
    eager = torch.optim.SGD(twin.parameters(), lr=LR)
    x, y = batch()
    model(x, y)
    eager_step(twin, eager, x, y)
    optimizer.param_groups[0]["lr"] = 0.0
    model(x, y)
    eager_step(twin, eager, x, y)
    model.setOptimizer(optimizer)
    model(x, y)
    assert_same_weights(net, twin)


def test_a_scheduler():
    net = Net()
    twin = copy.deepcopy(net)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.5)
    eager = torch.optim.SGD(twin.parameters(), lr=0.5)
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, 0.5) for o in (optimizer, eager)]
    model = train(net, optimizer=optimizer)
    x, y = batch()
    for _ in range(3):
        model(x, y)
        eager_step(twin, eager, x, y)
        optimizer.step()  # only to prevent a warning of the scheduler; no gradients, no effect
        for scheduler in schedulers:
            scheduler.step()
        model.setOptimizer(optimizer)
    assert_same_weights(net, twin)


def test_set_optimizer_keeps_momentum():
    net = Net()
    twin = copy.deepcopy(net)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    eager = torch.optim.SGD(twin.parameters(), lr=LR, momentum=0.9)
    model = train(net, optimizer=optimizer)
    x, y = batch()
    for lr in (LR, 0.5, 0.25):
        for group in (*optimizer.param_groups, *eager.param_groups):
            group["lr"] = lr
        model.setOptimizer(optimizer)
        model(x, y)
        eager_step(twin, eager, x, y)
    assert_same_weights(net, twin)


def test_groups_with_values_of_their_own():
    net = Net()
    twin = copy.deepcopy(net)

    def groups(model):
        return [
            {"params": model.fc1.parameters(), "lr": 0.5},
            {"params": model.fc2.parameters(), "lr": 0.0625, "weight_decay": 0.25},
        ]

    optimizer = poptorch.optim.SGD(groups(net), lr=LR, weight_decay=0.0)
    eager = torch.optim.SGD(groups(twin), lr=LR)
    model = train(net, optimizer=optimizer)
    for _ in range(3):
        x, y = batch()
        model(x, y)
        eager_step(twin, eager, x, y)
    assert_same_weights(net, twin)
