"""Copies and pickles of PyTorch's optimizers have the states that are on the device."""

import copy
import io
import pickle

import pytest
import torch

import popsim_torch as poptorch
from tests.parity.models import Regression


class Counting(torch.optim.Optimizer):
    """Is traced, and gives copies all of its attributes."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.name = "counting"

    def __getstate__(self):
        hooks = [name for name in vars(self) if name.endswith("_hooks")]
        return {name: value for name, value in vars(self).items() if name not in hooks}

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                p.sub_(p.grad, alpha=group["lr"] / state["count"])


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


MAKERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Counting": Counting,
}
WAYS = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda optimizer: pickle.loads(pickle.dumps(optimizer)),
    "save": saved,
}


def batches(count):
    return [(torch.randn(6, 4), torch.randn(6, 3)) for _ in range(count)]


def assert_same_states(own, theirs):
    assert own.keys() == theirs.keys()
    for index in theirs:
        assert own[index].keys() == theirs[index].keys()
        for name, value in theirs[index].items():
            torch.testing.assert_close(torch.as_tensor(own[index][name]), torch.as_tensor(value))


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_copy_has_the_states_of_the_device(make, way):
    net = Regression()
    optimizer = make(net.parameters())
    model = poptorch.trainingModel(net, optimizer=optimizer)
    for _ in range(2):  # (the states of the first copy must not stay in the second)
        for x, y in batches(2):
            model(x, y)
        twin = way(optimizer)
        assert type(twin) is type(optimizer)
        assert "__getstate__" not in vars(twin)
        states = twin.state_dict()["state"]
        assert len(states) == 2
        assert_same_states(states, optimizer.state_dict()["state"])


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_copy_of_model_and_optimizer_trains_on_like_the_original(make):
    net = Regression()
    optimizer = make(net.parameters())
    model = poptorch.trainingModel(net, optimizer=optimizer)
    first, second, third = batches(3)
    model(*first)
    model(*second)
    twin, twin_optimizer = copy.deepcopy((net, optimizer))
    model(*third)
    twin_optimizer.zero_grad()
    twin(*third).backward()
    twin_optimizer.step()
    for own, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), theirs.detach())


def test_a_copy_after_the_executor_has_ended():
    net = Regression()
    optimizer = torch.optim.Adam(net.parameters())
    model = poptorch.trainingModel(net, optimizer=optimizer)
    model(*batches(1)[0])
    expected = copy.deepcopy(optimizer.state_dict()["state"])
    model(*batches(1)[0])
    model.destroy()
    states = copy.deepcopy(optimizer).state_dict()["state"]
    assert states[0]["step"] == expected[0]["step"] + 1
