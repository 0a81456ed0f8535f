"""The optimizers' constructors, variable attributes, dictionaries and CPU steps."""

import copy
import logging
import math
import pickle

import pytest
import torch

from popsim_torch import optim
from popsim_torch.errors import Error

LOGGER = "poptorch::python"


@pytest.fixture
def fc() -> torch.nn.Linear:
    return torch.nn.Linear(3, 2)


# --- Constructors -------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("SGD", torch.optim.SGD),
        ("Adam", torch.optim.Adam),
        ("AdamW", torch.optim.AdamW),
        ("RMSprop", torch.optim.RMSprop),
        ("LAMB", torch.optim.Optimizer),
    ],
)
def test_optimizers_are_torchs_too(fc, name, base):
    optimizer = getattr(optim, name)(fc.parameters(), lr=0.1)
    assert isinstance(optimizer, base)
    assert isinstance(optimizer, optim.Optimizer)


def test_none_means_torchs_defaults(fc):
    ours = optim.Adam(fc.parameters()).defaults
    torchs = torch.optim.Adam(fc.parameters()).defaults
    assert ours == torchs


def test_sgd_positional_order(fc):
    optimizer = optim.SGD(
        fc.parameters(), 0.1, 0.9, 0.2, 0.3, False, None, None, None, 8.0, 4.0, True
    )
    group = optimizer.param_groups[0]
    assert [group[n] for n in ("lr", "momentum", "dampening", "weight_decay")] == [
        0.1,
        0.9,
        0.2,
        0.3,
    ]
    assert (optimizer.loss_scaling, group["velocity_scaling"]) == (8.0, 4.0)
    assert optimizer.use_combined_accum


def test_lamb_defaults(fc):
    optimizer = optim.LAMB(fc.parameters())
    assert optimizer.defaults == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "max_weight_norm": 65500.0,
    }
    assert optimizer.max_weight_norm == 65500.0
    assert optimizer.bias_correction


def test_max_grad_norm_defaults_to_infinity(fc):
    assert optim.SGD(fc.parameters(), lr=0.1).max_grad_norm == math.inf


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW"])
def test_max_grad_norm_must_be_a_number(fc, name):
    with pytest.raises(Error, match="max_grad_norm"):
        getattr(optim, name)(fc.parameters(), lr=0.1, max_grad_norm=math.nan)


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_amsgrad_is_refused(fc, name):
    with pytest.raises(ValueError, match="Only non-amsgrad"):
        getattr(optim, name)(fc.parameters(), amsgrad=True)


@pytest.mark.parametrize(
    "arguments",
    [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}],
)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "LAMB"])
def test_values_torch_would_refuse(fc, name, arguments):
    with pytest.raises(ValueError, match="Invalid"):
        getattr(optim, name)(fc.parameters(), **arguments)


@pytest.mark.parametrize(
    "arguments", [{}, {"momentum": 0.9, "dampening": 0.1}], ids=["no momentum", "dampening"]
)
def test_nesterov_needs_momentum_without_dampening(fc, arguments):
    with pytest.raises(ValueError, match="Nesterov"):
        optim.SGD(fc.parameters(), lr=0.1, nesterov=True, **arguments)


def test_accumulation_types(fc):
    message = "Accumulation types must be either torch.float32 or torch.float16"
    with pytest.raises(AssertionError, match=message):
        optim.Adam(fc.parameters(), accum_type=torch.bfloat16)
    optimizer = optim.Adam(fc.parameters(), second_order_momentum_accum_type=torch.float16)
    assert optimizer.accum_type == torch.float32
    assert optimizer.second_order_momentum_accum_type == torch.float16
    with pytest.raises(ValueError, match=message):
        optimizer.accum_type = torch.int32


def test_velocity_scaling_without_combined_accumulator_warns(fc, caplog):
    with caplog.at_level(logging.WARNING, LOGGER):
        optimizer = optim.SGD(fc.parameters(), lr=0.1, velocity_scaling=2.0)
    assert "velocity_scaling is ignored" in caplog.text
    assert "velocity_scaling" not in optimizer.defaults


def test_added_group_gets_the_velocity_scaling(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1, velocity_scaling=2.0, use_combined_accum=True)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert optimizer.param_groups[1]["velocity_scaling"] == 2.0


# --- Variable attributes ------------------------------------------------------


def test_given_attributes_are_variable(fc):
    attributes = optim.SGD(fc.parameters(), lr=0.1, momentum=0.0, loss_scaling=1.0).variable_attrs
    variable = ["lr", "momentum", "loss_scaling"]
    constant = ["dampening", "weight_decay", "nesterov"]
    assert not any(attributes.isConstant(name) for name in variable)
    assert all(attributes.isConstant(name) for name in constant)


def test_left_out_learning_rate_is_constant(fc):
    assert optim.Adam(fc.parameters()).variable_attrs.isConstant("lr")


@pytest.mark.parametrize(
    ("optimizer", "name"),
    [
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), "nesterov"),
        (lambda p: optim.RMSprop(p, centered=True), "centered"),
    ],
)
def test_structural_attributes_are_never_variable(fc, optimizer, name):
    assert optimizer(fc.parameters()).variable_attrs.isConstant(name)


def test_marking(fc):
    attributes = optim.SGD(fc.parameters(), lr=0.1).variable_attrs
    attributes.markAsConstant("lr")
    attributes.markAsVariable("weight_decay")
    assert attributes.isConstant("lr")
    assert not attributes.isConstant("weight_decay")


@pytest.mark.parametrize("method", ["isConstant", "markAsConstant", "markAsVariable"])
def test_unknown_attribute(fc, method):
    attributes = optim.SGD(fc.parameters(), lr=0.1).variable_attrs
    with pytest.raises(AssertionError, match="Unknown attribute"):
        getattr(attributes, method)("learning_rate")


# --- State dictionaries -------------------------------------------------------


class FakeDevice:
    def __init__(self):
        self.state = {"Accl___weight": torch.ones(2, 3)}
        self.parameters = {"scaledMomentum2___specific___weight": torch.tensor(0.9)}
        self.written = None

    def check_state(self, tensors):
        pass

    def version(self):
        return object()  # never the same

    def read_state(self):
        return {name: t.clone() for name, t in self.state.items()}

    def read_parameters(self):
        return {name: t.clone() for name, t in self.parameters.items()}

    def write_state(self, tensors):
        self.written = tensors


def linked_sgd(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1, momentum=0.9)
    device = FakeDevice()
    optimizer._link(device)
    return optimizer, device


def test_state_dict_before_compilation(fc):
    state = optim.SGD(fc.parameters(), lr=0.1).state_dict()
    assert list(state) == ["ipu_state", "ipu_param", "state", "param_groups"]
    assert state["ipu_state"] is None
    assert state["ipu_param"] is None


def test_state_dict_reads_the_device(fc):
    optimizer, device = linked_sgd(fc)
    device.state["Accl___weight"] += 1
    state = optimizer.state_dict()
    assert torch.equal(state["ipu_state"]["Accl___weight"], torch.full((2, 3), 2.0))
    assert set(state["ipu_param"]) == {"scaledMomentum2___specific___weight"}
    assert state["state"] == {}


def test_unlinked_optimizer_keeps_the_state_for_the_next_device(fc):
    optimizer, _ = linked_sgd(fc)
    optimizer._unlink()
    assert set(optimizer.state_dict()["ipu_state"]) == {"Accl___weight"}
    device = FakeDevice()
    optimizer._link(device)
    assert set(device.written) == {"Accl___weight"}


def test_unlinked_optimizer_without_state_writes_nothing(fc):
    optimizer, device = linked_sgd(fc)
    device.state = {}
    optimizer._unlink()
    following = FakeDevice()
    optimizer._link(following)
    assert following.written is None


@pytest.mark.parametrize("linked", [False, True])
def test_load_state_dict(fc, linked):
    saved = linked_sgd(fc)[0].state_dict()
    saved["param_groups"][0]["lr"] = 0.25
    optimizer = optim.SGD(fc.parameters(), lr=0.1, momentum=0.9)
    device = FakeDevice()
    if linked:
        optimizer._link(device)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert set(optimizer.state_dict()["ipu_state"]) == {"Accl___weight"}
    assert device.written is None
    if linked:
        optimizer._hand_over()
    else:
        optimizer._link(device)
    assert set(device.written) == {"Accl___weight", "scaledMomentum2___specific___weight"}


def test_load_state_dict_from_before_compilation(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1)
    optimizer.load_state_dict(optim.SGD(fc.parameters(), lr=0.2).state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.2
    device = FakeDevice()
    optimizer._link(device)
    assert device.written is None


def test_load_state_dict_errors(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="optimizer state dictionary because it is empty"):
        optimizer.load_state_dict({})
    torchs = torch.optim.SGD(fc.parameters(), lr=0.1).state_dict()
    with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded"):
        optimizer.load_state_dict(torchs)


@pytest.mark.parametrize("state", ["all", ["a list"], {"Accl___weight": "no tensor"}])
@pytest.mark.parametrize("key", ["ipu_state", "ipu_param"])
def test_a_state_that_holds_no_tensors_changes_nothing(fc, key, state):
    optimizer, _ = linked_sgd(fc)
    before = optimizer.state_dict()
    broken = {**before, key: state, "param_groups": [{**before["param_groups"][0], "lr": 7.0}]}
    with pytest.raises(Error, match=f"'{key}' has to hold tensors by name"):
        optimizer.load_state_dict(broken)
    assert optimizer.state_dict().keys() == before.keys()
    assert optimizer.param_groups[0]["lr"] == before["param_groups"][0]["lr"]


@pytest.mark.parametrize(
    "duplicate",
    [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_copies_keep_everything_but_the_device(fc, duplicate):
    optimizer = optim.SGD(
        fc.parameters(), lr=0.1, loss_scaling=8.0, use_combined_accum=True, max_grad_norm=2.0
    )
    optimizer._link(FakeDevice())
    clone = duplicate(optimizer)
    assert clone._device is None
    assert clone.loss_scaling == 8.0
    assert clone.max_grad_norm == 2.0
    assert clone.accum_type == torch.float32
    assert set(clone.state_dict()["ipu_state"]) == {"Accl___weight"}
    device = FakeDevice()
    clone._link(device)
    assert "Accl___weight" in device.written
    clone.variable_attrs.markAsConstant("lr")
    assert not optimizer.variable_attrs.isConstant("lr")


# --- On the CPU ---------------------------------------------------------------


def lamb_step(w, g, m, v, t, lr, betas, eps, wd, max_norm, bias_correction):
    m = betas[0] * m + (1 - betas[0]) * g
    v = betas[1] * v + (1 - betas[1]) * g**2
    c1, c2 = (1 - betas[0] ** t, 1 - betas[1] ** t) if bias_correction else (1, 1)
    u = (m / c1) / ((v / c2).sqrt() + eps) + wd * w
    ratio = min(float(w.norm()), max_norm) / float(u.norm()) if max_norm else 1.0
    return w - lr * ratio * u, m, v


@pytest.mark.parametrize("bias_correction", [True, False])
@pytest.mark.parametrize("max_norm", [65500.0, 0.5, 0.0])
def test_lamb_step(fc, bias_correction, max_norm):
    optimizer = optim.LAMB(
        fc.parameters(), lr=0.1, max_weight_norm=max_norm, bias_correction=bias_correction
    )
    w, m, v = fc.weight.detach().clone(), torch.zeros(2, 3), torch.zeros(2, 3)
    for t in range(1, 5):
        g = torch.randn(2, 3)
        fc.weight.grad = g
        assert optimizer.step() is None
        w, m, v = lamb_step(w, g, m, v, t, 0.1, (0.9, 0.999), 1e-8, 1e-2, max_norm, bias_correction)
        torch.testing.assert_close(fc.weight.detach(), w)


def test_lamb_step_of_a_zero_weight():
    weight = torch.nn.Parameter(torch.zeros(3))
    optimizer = optim.LAMB([weight], lr=0.1, weight_decay=0.0)
    weight.grad = torch.ones(3)
    assert optimizer.step(lambda: 2.5) == 2.5
    torch.testing.assert_close(weight.detach(), torch.full((3,), -0.1))


def test_other_optimizers_step_as_torchs(fc):
    twin = copy.deepcopy(fc)
    ours, torchs = optim.Adam(fc.parameters(), lr=0.1), torch.optim.Adam(twin.parameters(), lr=0.1)
    for parameter, other in zip(fc.parameters(), twin.parameters(), strict=True):
        parameter.grad = torch.ones_like(parameter)
        other.grad = torch.ones_like(parameter)
    ours.step()
    torchs.step()
    assert torch.equal(fc.weight, twin.weight)
