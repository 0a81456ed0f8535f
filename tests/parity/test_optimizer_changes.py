"""What optimizers of torch.optim are given between calls takes effect, as in eager PyTorch.

In a training model with ``setOptimizer``, in a function with ``repeat``, and between the epochs of
``fit``: each hyper-parameter of each optimizer, the schedulers that move several, and groups.
"""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR

import popsim_torch as poptorch
from tests.sweeps import combined, one_by_one

STEPS = 3  # in front of each change, and after the last
torch.manual_seed(3)
INPUTS, TARGETS = torch.randn(4 * STEPS, 4, 3), torch.randn(4 * STEPS, 4, 2)


def make_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))


class WithLoss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return poptorch.identity_loss(mse_loss(self.net(x), y), "none")


def eager(net, optimizer, changes):
    step = 0
    for change in [None, *changes]:
        if change is not None:
            change()
        for _ in range(STEPS):
            optimizer.zero_grad()
            mse_loss(net(INPUTS[step]), TARGETS[step]).backward()
            optimizer.step()
            step += 1


def in_a_training_model(net, optimizer, changes):
    model = poptorch.trainingModel(WithLoss(net), optimizer=optimizer)
    step = 0
    for change in [None, *changes]:
        if change is not None:
            change()
            model.setOptimizer(optimizer)
        for _ in range(STEPS):
            model(INPUTS[step], TARGETS[step])
            step += 1
    model.destroy()


def in_a_function(net, optimizer, changes):
    @poptorch.function
    def train(xs, ys):
        def body(iteration):
            x, y = (poptorch.dynamic_slice(data, 0, iteration, 1, 1)[0] for data in (xs, ys))
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            optimizer.step()
            return iteration + 1

        poptorch.repeat(STEPS, body, torch.tensor(0))

    for number, change in enumerate([None, *changes]):
        if change is not None:
            change()
        data = slice(STEPS * number, STEPS * (number + 1))
        train(INPUTS[data], TARGETS[data])
    return len(train._recordings)


def in_fit(net, optimizer, changes):
    class Changing:
        def on_epoch_end(self, epoch, logs=None):
            if epoch < len(changes):
                changes[epoch]()

    count = STEPS * (len(changes) + 1)
    poptorch.fit(
        net,
        list(zip(INPUTS[:count], TARGETS[:count], strict=True)),
        epochs=len(changes) + 1,
        steps_per_epoch=STEPS,
        loss=mse_loss,
        optimizer=optimizer,
        callbacks=[Changing()],
        verbose=0,
    )


WAYS = [in_a_training_model, in_a_function, in_fit]


def check(way, make_optimizer, make_changes, num_programs=1):
    """Compare the weights after all steps with those of eager PyTorch."""
    trained = []
    for train in (eager, way):
        net = make_net()
        optimizer = make_optimizer(net)
        found = train(net, optimizer, make_changes(net, optimizer))
        assert found in (None, num_programs)
        trained.append([p.detach().clone() for p in net.parameters()])
    torch.testing.assert_close(trained[1], trained[0], rtol=1e-4, atol=1e-5)


def setting(name, values):
    """Return what makes changes that give each group's attribute these values."""

    def make_changes(_net, optimizer):
        def change(value):
            for group in optimizer.param_groups:
                group[name] = value

        return [lambda value=value: change(value) for value in values]

    return make_changes


OPTIMIZERS = {
    "SGD": lambda net: torch.optim.SGD(net.parameters(), lr=0.1),
    "momentum": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "Adam": lambda net: torch.optim.Adam(net.parameters(), lr=0.1),
    "AdamW": lambda net: torch.optim.AdamW(net.parameters(), lr=0.1),
    "RMSprop": lambda net: torch.optim.RMSprop(net.parameters(), lr=0.01, momentum=0.5),
}
VALUES = {
    "lr": [0.05, 0.02],
    "momentum": [0.8, 0.4],
    "dampening": [0.3, 0.1],
    "nesterov": [True, False],
    "weight_decay": [0.1, 0.0],
    "betas": [(0.8, 0.99), (0.5, 0.9)],
    "eps": [1e-3, 1e-4],
    "alpha": [0.9, 0.5],
}
ADAM = ("lr", "betas", "eps", "weight_decay")
CASES = [
    *(("SGD", name) for name in ("lr", "momentum", "weight_decay")),
    *(("momentum", name) for name in ("lr", "momentum", "dampening", "nesterov", "weight_decay")),
    *(("Adam", name) for name in ADAM),
    *(("AdamW", name) for name in ADAM),
    *(("RMSprop", name) for name in ("lr", "alpha", "eps", "weight_decay", "momentum")),
]
# What a program is compiled for; a function records anew for each.
STRUCTURAL = {("SGD", "momentum"), ("momentum", "nesterov")}


# Values of SGD with momentum change in all ways, those of other optimizers in a training model.
@pytest.mark.parametrize(
    ("case", "way"),
    combined(CASES, WAYS, quick=lambda case, way: way is WAYS[0] or case[0] == "momentum"),
)
def test_a_value(way, case):
    optimizer, name = case
    programs = 2 if (optimizer, name) in STRUCTURAL else 1
    check(way, OPTIMIZERS[optimizer], setting(name, VALUES[name]), programs)


SCHEDULERS = {
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.2, total_steps=6),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.01, 0.1, step_size_up=2),
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 0.5**step),
}


@pytest.mark.parametrize("early", [True, False], ids=["made before", "made between calls"])
@pytest.mark.parametrize(
    ("optimizer", "scheduler", "way"), one_by_one(["momentum", "Adam", "AdamW"], SCHEDULERS, WAYS)
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_schedulers(optimizer, scheduler, way, early):
    def make_changes(_net, made):
        schedulers = [SCHEDULERS[scheduler](made)] if early else []

        def change():
            if not schedulers:
                schedulers.append(SCHEDULERS[scheduler](made))
            schedulers[0].step()

        return [change] * 3

    check(way, OPTIMIZERS[optimizer], make_changes)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_further_group_of_weights_that_were_frozen(optimizer, way):
    def make_optimizer(net):
        net[2].requires_grad_(False)
        return OPTIMIZERS[optimizer](net[0])

    def make_changes(net, made):
        def add():
            if len(made.param_groups) == 1:
                net[2].requires_grad_(True)
                made.add_param_group({"params": net[2].parameters(), "lr": 0.07})

        return [add, add]

    check(way, make_optimizer, make_changes, num_programs=2)


@pytest.mark.parametrize("way", [in_a_function, in_fit])
def test_a_further_group_of_weights_that_nobody_trained(way):
    def make_changes(net, made):
        return [lambda: made.add_param_group({"params": net[2].parameters(), "lr": 0.07})]

    check(way, lambda net: OPTIMIZERS["Adam"](net[0]), make_changes, num_programs=2)


def test_constants_are_what_the_constructor_of_poptorch_leaves_out():
    net = make_net()
    optimizer = poptorch.optim.Adam(net.parameters(), lr=0.1, eps=1e-4)
    model = poptorch.trainingModel(WithLoss(net), optimizer=optimizer)
    model(INPUTS[0], TARGETS[0])
    optimizer.param_groups[0]["eps"] = 1e-3
    model.setOptimizer(optimizer)
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)
    with pytest.raises(poptorch.Error, match="Values are constant but do not match: 'beta1'"):
        model.setOptimizer(optimizer)


def test_another_optimizer_type_is_refused_as_before():
    net = make_net()
    model = poptorch.trainingModel(WithLoss(net), optimizer=OPTIMIZERS["Adam"](net))
    model(INPUTS[0], TARGETS[0])
    with pytest.raises(poptorch.Error, match="Optimizer types do not match"):
        model.setOptimizer(OPTIMIZERS["SGD"](net))
