"""The optimizers' contract with PopTorch's programs, table by table."""

import copy
import inspect
import logging
import math
import pickle

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import optim
from popsim_torch.enums import MeanReductionStrategy
from popsim_torch.optim.planning import plan_updates, read_optimizer
from tests.options import make_options
from tests.unit.optim.plans import LOGGER

TYPES = ["first_order_momentum_accum_type", "second_order_momentum_accum_type"]
SIGNATURES = {
    "SGD": [
        *("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize", "foreach"),
        *("differentiable", "loss_scaling", "velocity_scaling", "use_combined_accum"),
        *("accum_type", "velocity_accum_type", "max_grad_norm"),
    ],
    "Adam": [
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "foreach", "maximize", "capturable"),
        *("differentiable", "fused", "loss_scaling", "accum_type", *TYPES, "max_grad_norm"),
    ],
    "AdamW": [
        *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable"),
        *("differentiable", "fused", "loss_scaling", "bias_correction", "accum_type", *TYPES),
        "max_grad_norm",
    ],
    "RMSprop": [
        *("lr", "alpha", "eps", "weight_decay", "momentum", "centered", "foreach", "maximize"),
        *("differentiable", "loss_scaling", "accum_type", *TYPES, "use_tf_variant"),
    ],
    "LAMB": [
        *("lr", "betas", "eps", "weight_decay", "bias_correction", "loss_scaling"),
        *("max_weight_norm", "accum_type", *TYPES),
    ],
}
NAMES = sorted(SIGNATURES)
# The object's attributes, the keys of groups, and what is variable if it is given.
PLACES = {
    "SGD": (
        {"loss_scaling", "use_combined_accum", "accum_type", "velocity_accum_type"},
        {"lr", "momentum", "dampening", "weight_decay", "nesterov"},
    ),
    "Adam": ({"loss_scaling", "accum_type", *TYPES, "max_grad_norm"}, {"lr", "betas", "eps"}),
    "AdamW": (
        {"loss_scaling", "accum_type", *TYPES, "max_grad_norm", "bias_correction"},
        {"lr", "betas", "eps", "weight_decay"},
    ),
    "RMSprop": (
        {"loss_scaling", "accum_type", *TYPES, "use_tf_variant"},
        {"lr", "alpha", "eps", "weight_decay", "momentum", "centered"},
    ),
    "LAMB": (
        {"loss_scaling", "accum_type", *TYPES, "bias_correction", "max_weight_norm"},
        {"lr", "betas", "eps", "weight_decay", "max_weight_norm"},
    ),
}
# Torch's own defaults; structural settings are never variable.
GIVEN = {
    "SGD": {"lr": 0.1, "momentum": 0.5, "dampening": 0.0, "weight_decay": 0.0},
    "Adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "AdamW": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    "RMSprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0},
    "LAMB": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
}


def make(name, fc, **arguments):
    return getattr(optim, name)(fc.parameters(), **({"lr": None} | arguments))


# --- Classes and their arguments -------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_arguments_in_their_order(name):
    parameters = inspect.signature(getattr(optim, name)).parameters
    assert list(parameters) == ["params", *SIGNATURES[name]]
    required = {n for n, p in parameters.items() if p.default is p.empty}
    assert required == ({"params", "lr"} if name == "SGD" else {"params"})
    assert all(p.default is None for n, p in parameters.items() if n not in required)


@pytest.mark.parametrize("name", NAMES)
def test_where_values_live(fc, name):
    optimizer = make(name, fc)
    of_object, of_groups = PLACES[name]
    assert all(hasattr(optimizer, attribute) for attribute in of_object)
    for values in (optimizer.defaults, *optimizer.param_groups):
        assert of_groups <= set(values)
        assert not (of_object - {"max_weight_norm"}) & set(values)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_given_is_variable_also_at_its_default(fc, name):
    alone = make(name, fc)
    for attribute, value in (GIVEN[name] | {"loss_scaling": 1.0}).items():
        assert alone.variable_attrs.isConstant(attribute)
        optimizer = make(name, fc, **{attribute: value})
        variable = {n for n in GIVEN[name] if not optimizer.variable_attrs.isConstant(n)}
        assert variable | {"loss_scaling"} == {attribute, "loss_scaling"}
        assert not optimizer.variable_attrs.isConstant(attribute)


FLAGS = ("maximize", "foreach", "differentiable", "capturable")


@pytest.mark.parametrize(
    "name, flag", [(name, flag) for name in NAMES for flag in FLAGS if flag in SIGNATURES[name]]
)
def test_arguments_of_torch_that_the_device_ignores(fc, name, flag):
    trained = []
    for value in (False, True):
        net = copy.deepcopy(fc)
        optimizer = make(name, net, lr=0.1, **{flag: value})
        model = poptorch.trainingModel(Square(net), make_options(), optimizer)
        model(torch.ones(1, 3))
        trained.append(net.weight.detach().clone())
    assert torch.equal(*trained)
    assert not torch.equal(trained[0], fc.weight)


class Square(nn.Module):
    def __init__(self, fc):
        super().__init__()
        self.fc = fc

    def forward(self, x):
        return poptorch.identity_loss(self.fc(x).square(), "sum")


MISTAKES = [
    ("Adam", {"amsgrad": True}, ValueError, "Only non-amsgrad"),
    ("AdamW", {"amsgrad": True}, ValueError, "Only non-amsgrad"),
    ("SGD", {"accum_type": torch.int32}, AssertionError, "must be either torch.float32"),
    ("LAMB", {"accum_type": torch.float64}, AssertionError, "or torch.float16"),
    ("SGD", {"max_grad_norm": math.nan}, poptorch.Error, "max_grad_norm"),
    ("Adam", {"max_grad_norm": math.nan}, poptorch.Error, "max_grad_norm"),
    ("SGD", {"lr": -1.0}, ValueError, "Invalid learning rate"),
    ("Adam", {"betas": (1.0, 0.9)}, ValueError, "Invalid beta parameter"),
    ("LAMB", {"betas": (0.5, 1.5)}, ValueError, "Invalid beta parameter"),
    ("SGD", {"nesterov": True}, ValueError, "Nesterov momentum requires"),
]


@pytest.mark.parametrize("name, arguments, kind, message", MISTAKES)
def test_mistakes_in_constructors(fc, name, arguments, kind, message):
    with pytest.raises(kind, match=message):
        make(name, fc, **arguments)


def test_an_element_type_assigned_later(fc):
    with pytest.raises(ValueError, match=r"must be either torch.float32 or torch.float16"):
        make("Adam", fc).accum_type = torch.int8


# --- Constants of torch's optimizers ---------------------------------------------------------

# Everything that PyTorch's schedulers can change, except a momentum of 0, which has no velocities.
OF_SGD = {"lr", "dampening", "weight_decay"}
OF_ADAM = {"lr", "beta1", "beta2", "eps", "weight_decay"}
OF_RMSPROP = {"lr", "alpha", "eps", "weight_decay"}
TORCHS = [
    (torch.optim.SGD, {"lr": 0.1}, OF_SGD),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5}, OF_SGD | {"momentum"}),
    (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.5, "dampening": 0.1, "weight_decay": 0.1},
        OF_SGD | {"momentum"},
    ),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.5, "nesterov": True}, OF_SGD | {"momentum"}),
    (torch.optim.Adam, {}, OF_ADAM),
    (torch.optim.Adam, {"betas": (0.5, 0.5), "eps": 1e-3}, OF_ADAM),
    (torch.optim.Adam, {"weight_decay": 0.1}, OF_ADAM),
    (torch.optim.AdamW, {}, OF_ADAM),
    (torch.optim.AdamW, {"weight_decay": 0.0}, OF_ADAM),
    (torch.optim.RMSprop, {"alpha": 0.5}, OF_RMSPROP),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}, OF_RMSPROP | {"momentum"}),
]


@pytest.mark.parametrize("kind, arguments, variable", TORCHS)
def test_what_is_variable_of_torchs_optimizers(fc, kind, arguments, variable):
    settings = read_optimizer(kind(fc.parameters(), **arguments))
    for values in (settings.defaults, settings.groups[0].values):
        assert {name for name, value in values.items() if not value.constant} == variable
    assert settings.loss_scaling.constant


# --- Element types of state ------------------------------------------------------------------

HALF = torch.float16
STATE_TYPES = [
    ("SGD", {"accum_type": HALF}, {"Accum": HALF, "Accl": torch.float32}),
    ("SGD", {"velocity_accum_type": HALF}, {"Accum": torch.float32, "Accl": HALF}),
    ("Adam", {"accum_type": HALF}, {"Accum": HALF, "Accl1": torch.float32}),
    ("AdamW", {TYPES[0]: HALF}, {"Accl1": HALF, "Accl2": torch.float32, "Step": torch.float32}),
    ("LAMB", {TYPES[1]: HALF}, {"Accl1": torch.float32, "Accl2": HALF}),
    ("RMSprop", {TYPES[0]: HALF}, {"Accl1": HALF, "Accl2": torch.float32, "Accl3": HALF}),
    ("RMSprop", {TYPES[1]: HALF}, {"Accl1": torch.float32, "Accl3": torch.float32}),
]


@pytest.mark.parametrize("name, arguments, types", STATE_TYPES)
def test_element_types_of_state(fc, name, arguments, types):
    more = {"SGD": {"momentum": 0.5}, "RMSprop": {"momentum": 0.5, "centered": True}}
    optimizer = make(name, fc, **more.get(name, {}), **arguments)
    plan = plan_updates(optimizer, dict(fc.named_parameters()), gradient_accumulation=2)
    found = {state.kind: state.dtype for state in plan.updates[0].all_states}
    assert types.items() <= found.items()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_combined_velocity_has_the_type_of_the_weight(fc, dtype):
    fc = fc.to(dtype)
    optimizer = make("SGD", fc, momentum=0.5, use_combined_accum=True, accum_type=torch.float16)
    plan = plan_updates(optimizer, dict(fc.named_parameters()), gradient_accumulation=2)
    assert [(s.kind, s.dtype) for s in plan.updates[0].all_states] == [("Accl", dtype)]


# --- The log ---------------------------------------------------------------------------------

GRAPH_LINES = [
    (
        lambda p: optim.SGD(p, lr=0.01, loss_scaling=2.0),
        "Updating graph optimizer with SGD2, defaultLearningRate=0.01, "
        "defaultWeightDecay=0 (const), defaultMomentum=0 (const), defaultDampening=0 (const), "
        "defaultVelocityScaling=2, nesterov=0 (const), lossScaling=2, ",
        "Updating group 0 optimizer with SGD2, learningRate=0.01, weightDecay=0 (const), "
        "momentum=0 (const), dampening=0 (const), velocityScaling=2, nesterov=0 (const), ",
    ),
    (
        lambda p: optim.SGD(p, lr=0.5, momentum=0.9, use_combined_accum=True, velocity_scaling=4.0),
        "Updating graph optimizer with SGD1, defaultLearningRate=0.5, "
        "defaultWeightDecay=0 (const), defaultMomentum=0.9, defaultDampening=0 (const), "
        "defaultVelocityScaling=4, nesterov=0 (const), lossScaling=1 (const), ",
        "Updating group 0 optimizer with SGD1, learningRate=0.5, weightDecay=0 (const), "
        "momentum=0.9, dampening=0 (const), velocityScaling=4, nesterov=0 (const), ",
    ),
    (
        lambda p: optim.Adam(p, betas=(0.5, 0.75), max_grad_norm=3.0),
        "Updating graph optimizer with ADAM, defaultLearningRate=0.001 (const), "
        "defaultWeightDecay=0 (const), defaultBeta1=0.5, defaultBeta2=0.75, "
        "defaultEps=1e-08 (const), lossScaling=1 (const), ",
        "Updating group 0 optimizer with ADAM, learningRate=0.001 (const), "
        "weightDecay=0 (const), beta1=0.5, beta2=0.75, eps=1e-08 (const), ",
    ),
    (
        lambda p: optim.LAMB(p, lr=2.0),
        "Updating graph optimizer with LAMB, defaultLearningRate=2, ",
        "Updating group 0 optimizer with LAMB, learningRate=2, ",
    ),
    (
        lambda p: optim.RMSprop(p, alpha=0.5),
        "Updating graph optimizer with RMSPROP, defaultLearningRate=0.01 (const), "
        "defaultWeightDecay=0 (const), defaultMomentum=0 (const), defaultEps=1e-08 (const), "
        "defaultAlpha=0.5, lossScaling=1 (const), accumType=FLOAT, "
        "firstOrderMomentumAccumType=FLOAT, secondOrderMomentumAccumType=FLOAT, useTfVariant=0",
        "Updating group 0 optimizer with RMSPROP, learningRate=0.01 (const), ",
    ),
]


@pytest.mark.parametrize("make_optimizer, of_graph, of_group", GRAPH_LINES)
def test_the_log_tells_every_value(fc, make_optimizer, of_graph, of_group):
    plan = plan_updates(make_optimizer(fc.parameters()), dict(fc.named_parameters()))
    graph, group = plan.description
    assert graph.startswith(of_graph)
    assert group.startswith(of_group)
    assert group.endswith(" for (tensors affected weight, bias)")


def logged(caplog, *beginnings):
    """Return the messages with this beginning, and clear the log."""
    found = [r.getMessage() for r in caplog.records if r.getMessage().startswith(beginnings)]
    caplog.clear()
    return found


def test_the_log_tells_of_uploads_alone(fc, caplog):
    caplog.set_level(logging.DEBUG, LOGGER)
    optimizer = optim.SGD(fc.parameters(), lr=0.5)
    model = poptorch.trainingModel(Square(fc), make_options(), optimizer)
    assert logged(caplog, "Updating") == []
    model(torch.ones(1, 3))
    assert len(logged(caplog, "Updating")) == 2
    model.setOptimizer(torch.optim.SGD(fc.parameters(), lr=0.5))
    assert logged(caplog, "Updating") == []
    model.setOptimizer(torch.optim.SGD(fc.parameters(), lr=0.25))
    assert "defaultLearningRate=0.25, " in logged(caplog, "Updating graph")[0]


class Mine(optim.SGD):
    """A user's own optimizer class."""


def test_subclasses_are_warned_of_whenever_they_are_read(fc, caplog):
    model = poptorch.trainingModel(Square(fc), make_options(), Mine(fc.parameters(), lr=0.1))
    assert "does not run Python optimizer code directly" in logged(caplog, "Mine")[0]
    model.setOptimizer(Mine(fc.parameters(), lr=0.2))
    assert len(logged(caplog, "Mine")) == 1
    model.setOptimizer(optim.SGD(fc.parameters(), lr=0.2))
    assert logged(caplog, "Mine", "SGD") == []


# --- Gradient accumulation -------------------------------------------------------------------


def strategy_of(model):
    return model.options.Training.meanAccumulationAndReplicationReductionStrategy


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("chosen", [MeanReductionStrategy.Post, MeanReductionStrategy.Running])
def test_half_accumulators_choose_running_means(fc, chosen, frozen):
    options = make_options(1, 2)
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(chosen)
    if frozen:
        options.freeze()
    optimizer = optim.SGD(fc.parameters(), lr=0.1, accum_type=torch.float16)
    model = poptorch.trainingModel(Square(fc), options, optimizer)
    assert strategy_of(model) == MeanReductionStrategy.Running
    assert model.options.Training.gradient_accumulation == 2
    model(torch.ones(2, 3))


def test_half_accumulators_come_too_late_after_compilation(fc):
    model = poptorch.trainingModel(
        Square(fc), make_options(1, 2), optim.Adam(fc.parameters(), lr=0.1)
    )
    model(torch.ones(2, 3))
    half = optim.Adam(fc.parameters(), lr=0.1, accum_type=torch.float16)
    with pytest.raises(ValueError, match=r"would require changing .* already compiled"):
        model.setOptimizer(half)
    assert strategy_of(model) == MeanReductionStrategy.Post


# --- State dictionaries ----------------------------------------------------------------------


def adam_model(fc, **arguments):
    optimizer = optim.Adam(fc.parameters(), lr=0.1, **arguments)
    return poptorch.trainingModel(Square(fc), make_options(), optimizer), optimizer


def test_state_is_read_when_a_run_came_in_between(fc, caplog):
    caplog.set_level(logging.DEBUG, LOGGER)
    caplog.set_level(logging.DEBUG, "poptorch:cpp")
    model, optimizer = adam_model(fc)
    assert optimizer.state_dict()["ipu_state"] is None
    model.compile(torch.ones(1, 3))
    messages = ("Writing optimiser state tensors from IPU to host", "Using cached optimiser state")
    logged(caplog)
    assert optimizer.state_dict()["ipu_state"]["Step___fc.weight"].item() == 0
    assert logged(caplog, *messages) == [messages[0]]
    optimizer.state_dict()
    assert logged(caplog, *messages) == ["Using cached optimiser state dict"]
    model(torch.ones(1, 3))
    state = optimizer.state_dict()
    assert state["ipu_state"]["Step___fc.weight"].item() == 1
    assert logged(caplog, *messages) == [messages[0]]
    assert set(state["ipu_state"]) == {
        f"{kind}___fc.{name}" for kind in ("Accl1", "Accl2", "Step") for name in ("weight", "bias")
    }
    assert set(state["ipu_param"]) == {
        f"learningRate___specific___fc.{n}" for n in ("weight", "bias")
    }


def test_plain_sgd_has_an_empty_state(fc):
    optimizer = optim.SGD(fc.parameters(), lr=0.1)
    model = poptorch.trainingModel(Square(fc), make_options(1, 2), optimizer)
    model(torch.ones(2, 3))
    assert optimizer.state_dict()["ipu_state"] == {}


def test_loaded_state_counts_from_the_next_run(fc, caplog):
    model, optimizer = adam_model(fc)
    model(torch.ones(1, 3))
    saved = optimizer.state_dict()
    saved["ipu_state"]["Step___fc.weight"].fill_(10)
    del saved["ipu_state"]["Step___fc.bias"]
    optimizer.load_state_dict(saved)
    until_then = optimizer.state_dict()["ipu_state"]
    assert until_then["Step___fc.weight"].item() == 10
    assert "Step___fc.bias" not in until_then
    assert logged(caplog, "The optimizer state has no value") == []
    model(torch.ones(1, 3))
    assert len(logged(caplog, "The optimizer state has no value")) == 1
    after = optimizer.state_dict()["ipu_state"]
    assert after["Step___fc.weight"].item() == 11
    assert after["Step___fc.bias"].item() == 2


def test_loaded_state_reaches_the_device_with_set_optimizer(fc):
    model, optimizer = adam_model(fc)
    model(torch.ones(1, 3))
    saved = optimizer.state_dict()
    model(torch.ones(1, 3))
    optimizer.load_state_dict(saved)
    model.setOptimizer(optimizer)
    assert optimizer.state_dict()["ipu_state"]["Step___fc.weight"].item() == 1


def test_loaded_scalars_come_before_attributes_until_they_change(fc):
    model, optimizer = adam_model(fc)
    model(torch.ones(1, 3))
    name = "learningRate___specific___fc.weight"
    saved = optimizer.state_dict()
    saved["ipu_param"][name].fill_(0.75)
    optimizer.load_state_dict(saved)
    model(torch.ones(1, 3))
    model.setOptimizer(optimizer)  # its values have not changed
    assert optimizer.state_dict()["ipu_param"][name].item() == 0.75
    optimizer.param_groups[0]["lr"] = 0.5
    model.setOptimizer(optimizer)
    assert optimizer.state_dict()["ipu_param"][name].item() == 0.5


def test_a_state_of_another_shape_is_refused_at_once(fc):
    model, optimizer = adam_model(fc)
    model(torch.ones(1, 3))
    saved = optimizer.state_dict()
    saved["ipu_state"]["Accl1___fc.weight"] = torch.zeros(7)
    with pytest.raises(poptorch.Error, match=r"Accl1___fc.weight.*\(7,\)"):
        optimizer.load_state_dict(saved)
    model(torch.ones(1, 3))
    assert optimizer.state_dict()["ipu_state"]["Step___fc.weight"].item() == 2


DICTIONARIES = [
    ({}, "optimizer state dictionary because it is empty"),
    ({"state": {}, "param_groups": []}, "Only IPU optimizer states .* loaded onto the IPU"),
]


@pytest.mark.parametrize("dictionary, message", DICTIONARIES)
def test_dictionaries_that_are_refused(fc, dictionary, message):
    with pytest.raises(RuntimeError, match=message):
        make("Adam", fc).load_state_dict(dictionary)


def test_destroyed_models_state_goes_to_the_next_executor(fc):
    model, optimizer = adam_model(fc)
    model(torch.ones(1, 3))
    model.destroy()
    saved = optimizer.state_dict()
    other, other_optimizer = adam_model(fc)
    other_optimizer.load_state_dict(saved)
    other.compile(torch.ones(1, 3))
    found = other_optimizer.state_dict()["ipu_state"]
    assert found.keys() == saved["ipu_state"].keys()
    assert all(torch.equal(found[name], value) for name, value in saved["ipu_state"].items())


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_keep_what_was_loaded_and_not_uploaded(fc, duplicate):
    model, optimizer = adam_model(fc)
    model(torch.ones(1, 3))
    saved = optimizer.state_dict()
    saved["ipu_state"]["Step___fc.weight"].fill_(10)
    optimizer.load_state_dict(saved)
    twin = duplicate(optimizer)
    twin = pickle.loads(twin) if isinstance(twin, bytes) else twin
    assert twin.state_dict()["ipu_state"]["Step___fc.weight"].item() == 10
    assert not twin.variable_attrs.isConstant("lr")
