"""Steps that keep tensors in groups, as D-Adaptation and Prodigy do."""

import copy

import pytest
import torch

import popsim_torch as poptorch
from tests.parity.test_traced_optimizers import Pair, quiet


class Distances(torch.optim.Optimizer):
    """Each group has a tensor and a count of its own; the step divides by a norm of all groups."""

    def __init__(self, parameters, lr=0.01):
        first, second = list(parameters[:2]), list(parameters[2:])
        groups = [
            {"params": first, "rate": 1, "scale": torch.tensor(0.2)},
            {"params": second, "rate": 3, "scale": torch.tensor([0.1])},
        ]
        super().__init__(groups, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self):
        norm = sum(p.grad.square().sum() for g in self.param_groups for p in g["params"]).sqrt()
        for group in self.param_groups:
            if "sums" not in group:
                group["sums"] = torch.zeros(2)
            group["sums"].mul_(0.9).add_(norm * group["rate"])
            group["count"] += group["rate"]
            for p in group["params"]:
                change = p.grad / norm * group["sums"].sum() / group["count"]
                p.sub_(group["lr"] * group["scale"] * change)


class Means(torch.optim.Optimizer):
    """Puts another tensor into the group in each step."""

    def __init__(self, parameters, lr=0.01, shrink=0.9):
        super().__init__(parameters, {"lr": lr, "shrink": shrink})

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        norm = group["params"][0].grad.norm()
        group["mean"] = norm if "mean" not in group else group["shrink"] * group["mean"] + norm
        for p in group["params"]:
            p.sub_(p.grad, alpha=group["lr"])
            p.div_(1 + group["mean"] * group["lr"])


class SetUp(torch.optim.Optimizer):
    """Makes its tensors in the first step, and a truth value of the group says that it has."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr, "setup": False})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if not group["setup"]:
                group["setup"] = True
                group["step"] = torch.tensor(0, dtype=torch.int32)
                for p in group["params"]:
                    self.state[p]["mean"] = torch.zeros_like(p)
            group["step"].add_(1)
            for p in group["params"]:
                mean = self.state[p]["mean"].mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * mean / (1 - 0.9 ** group["step"]))


def entries(optimizer):
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.state_dict()["param_groups"]
    ]


def assert_same_groups(pair):
    for own, other in zip(entries(pair.optimizer), entries(pair.reference), strict=True):
        assert own.keys() == other.keys()
        for key, value in other.items():
            assert type(own[key]) is type(value), key
            torch.testing.assert_close(own[key], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("make", [Distances, Means, SetUp])
def test_values_and_what_the_host_sees(make):
    pair = Pair(make)
    pair.step(0, 4)
    pair.check()
    assert_same_groups(pair)
    pair.step(4, 8)
    pair.check()
    assert_same_groups(pair)


@pytest.mark.parametrize("make", [Distances, Means])
def test_another_program_goes_on_with_them(make):
    pair = Pair(make)
    pair.step(0, 3)
    pair.model.copyWeightsToHost()
    net = copy.deepcopy(pair.net)
    optimizer = make(list(net.parameters()))
    optimizer.load_state_dict(pair.optimizer.state_dict())
    pair.net, pair.optimizer = net, optimizer
    pair.model = poptorch.trainingModel(net, quiet(), optimizer)
    pair.step(3, 6)
    pair.check()
    assert_same_groups(pair)


def test_each_has_a_name_and_can_be_anchored():
    options = quiet()
    options.anchorTensor("sums", "UpdatedVar___group.sums___a.weight")
    pair = Pair(Distances, options)
    pair.step(0, 2)
    names = [name for name in pair.model.getTensorNames() if name.startswith("group.")]
    parameters = [name for name, _ in pair.net.named_parameters()]
    assert names == [f"group.{key}___{parameters[i]}" for i in (0, 2) for key in ("count", "sums")]
    expected = pair.reference.param_groups[0]["sums"]
    torch.testing.assert_close(pair.model.getAnchoredTensor("sums"), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("resumed", [False, True])
def test_those_that_a_step_leaves_alone_are_hyper_parameters(resumed):
    pair = Pair(Distances)
    pair.step(0, 2)
    if resumed:
        pair.optimizer.state_dict()
        pair.model.destroy()
        pair.model = poptorch.trainingModel(pair.net, quiet(), pair.optimizer)
        pair.step(2, 3)
    for one in (pair.optimizer, pair.reference):
        one.param_groups[0]["scale"] = torch.tensor(0.7)
        one.param_groups[1]["lr"] = 0.05
    pair.model.setOptimizer(pair.optimizer)
    pair.step(3, 6)
    pair.check()


def test_values_that_the_host_loads():
    pair = Pair(Means)
    pair.step(0, 3)
    states = pair.optimizer.state_dict()
    states["param_groups"][0]["mean"] = torch.tensor(5.0)
    for one in (pair.optimizer, pair.reference):
        one.load_state_dict(copy.deepcopy(states))
    pair.model.setOptimizer(pair.optimizer)
    pair.step(3, 6)
    pair.check()


class Wrong(torch.optim.Optimizer):
    def __init__(self, parameters, change):
        super().__init__(parameters, {"lr": 0.01, "kept": 1.0})
        self.change = change

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        self.change(group, group["params"][0].grad.norm())
        for p in group["params"]:
            p.sub_(group["lr"] * p.grad)


def longer(group, norm):
    group["norms"] = torch.cat([group.get("norms", torch.zeros(0)), norm.reshape(1)])


def in_list(group, norm):
    group["norms"] = [*group.get("norms", [])[-1:], norm]


def in_place_of_a_number(group, norm):
    group["kept"] = group["kept"] * 0.5 + norm


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (longer, r"changes the shape of 'norms' of group 0 from \[1\] to \[2\]"),
        (in_list, r"group 0|'norms"),
        (in_place_of_a_number, "changes 'kept' of group 0"),
    ],
)
def test_mistakes(change, message):
    pair = Pair(lambda parameters: Wrong(parameters, change))
    with pytest.raises(poptorch.Error, match=message):
        pair.step(0, 1)
    assert pair.optimizer.param_groups[0]["kept"] == 1.0
    assert "norms" not in pair.optimizer.param_groups[0]


def test_what_steps_have_made_is_not_reported_as_unexpected(caplog):
    pair = Pair(Distances)
    pair.step(0, 2)
    states = copy.deepcopy(pair.optimizer.state_dict())
    for one in (pair.optimizer, pair.reference):
        one.load_state_dict(copy.deepcopy(states))
    pair.model.setOptimizer(pair.optimizer)
    pair.step(2, 4)
    pair.check()
    assert "unexpected" not in caplog.text
    pair.optimizer.param_groups[0]["speed"] = 1
    pair.model.setOptimizer(pair.optimizer)
    assert "unexpected group 0 attribute in Distances optimizer: ['speed']" in caplog.text
