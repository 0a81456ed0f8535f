"""The wrapper is an optimizer in all respects: groups, state, schedules and files are those of
the wrapped one."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutfeedOptimizerMode
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.observe import MaybeOutfeedQueue, OutfeedOptimizer
from popsim_torch.optim.captures import unwrapped

BEFORE, AFTER = OutfeedOptimizerMode.BEFORE_APPLY, OutfeedOptimizerMode.AFTER_COMPUTE


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))


@pytest.fixture
def inner(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture
def outer(inner):
    return OutfeedOptimizer(inner, MaybeOutfeedQueue())


def train(model, optimizer):
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).sum().backward()
        optimizer.step()


def test_it_is_an_optimizer(outer, inner):
    assert isinstance(outer, torch.optim.Optimizer)
    assert outer.param_groups is inner.param_groups
    assert outer.state is inner.state
    assert outer.defaults is inner.defaults
    assert "SGD" in repr(outer)


def test_on_the_host_it_trains_as_the_wrapped_one_does(model, outer):
    other = copy.deepcopy(model)
    train(model, outer)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_a_closure_is_called(model, outer):
    losses = []

    def closure():
        outer.zero_grad()
        loss = model(torch.ones(4, 3)).sum()
        loss.backward()
        losses.append(loss)
        return loss

    assert outer.step(closure) is losses[0]


def test_a_schedule_changes_the_wrapped_ones_rate(model, outer, inner):
    schedule = torch.optim.lr_scheduler.StepLR(outer, 1, gamma=0.5)
    train(model, outer)
    schedule.step()
    assert inner.param_groups[0]["lr"] == 0.05


def test_a_schedule_believes_a_device_that_has_stepped(outer, inner):
    schedule = torch.optim.lr_scheduler.StepLR(outer, 1, gamma=0.5)
    inner._opt_called = True  # an executor does this too
    schedule.step()  # a warning would raise an error
    assert outer.param_groups[0]["lr"] == 0.05


def test_state_goes_to_another_optimizer_and_back(model, outer):
    train(model, outer)
    other = torch.optim.SGD(model.parameters(), lr=1.0)
    other.load_state_dict(outer.state_dict())
    assert other.param_groups[0]["lr"] == 0.1
    third = OutfeedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), MaybeOutfeedQueue())
    third.load_state_dict(other.state_dict())
    momentum = third.state[model[0].weight]["momentum_buffer"]
    torch.testing.assert_close(momentum, outer.state[model[0].weight]["momentum_buffer"])


def test_hooks_and_groups_are_the_wrapped_ones(model, outer, inner):
    seen = []
    outer.register_step_pre_hook(lambda *_: seen.append(1))
    outer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 3.0})
    train(model, outer)
    assert len(seen) == 3
    assert [group["lr"] for group in inner.param_groups] == [0.1, 3.0]


def test_attributes_are_read_and_set_through_the_wrapper(model):
    inner = poptorch.optim.SGD(model.parameters(), lr=0.1, loss_scaling=2.0)
    outer = OutfeedOptimizer(inner, MaybeOutfeedQueue())
    assert outer.loss_scaling == 2.0
    outer.loss_scaling = 4.0
    outer.variable_attrs.markAsConstant("loss_scaling")
    assert inner.loss_scaling == 4.0
    assert inner.variable_attrs.isConstant("loss_scaling")
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = outer.nonsense


def test_a_copy_has_groups_of_its_own_and_feeds_the_same_queue(outer):
    other = copy.deepcopy(outer)
    other.param_groups[0]["lr"] = 7.0
    assert outer.param_groups[0]["lr"] == 0.1
    assert other.queue is outer.queue
    assert other.mode == outer.mode


def test_two_wrappers_capture_both_kinds_of_gradients(inner, model):
    first, second = MaybeOutfeedQueue(), MaybeOutfeedQueue()
    outer = OutfeedOptimizer(OutfeedOptimizer(inner, first, AFTER), second, model=model)
    found, captures = unwrapped(outer)
    assert found is inner
    assert [(one.queue, one.mode) for one in captures] == [(second, BEFORE), (first, AFTER)]
    assert captures[0].names[id(model[2].bias)] == "2.bias"


def test_an_optimizer_of_its_own_captures_nothing(inner):
    assert unwrapped(inner) == (inner, ())


def test_only_optimizers_can_be_wrapped(model):
    with pytest.raises(UsageTypeError, match="can wrap optimizers only, got a Sequential"):
        OutfeedOptimizer(model, MaybeOutfeedQueue())


def test_the_queue_is_one_with_filters(inner):
    with pytest.raises(UsageTypeError, match="the queue is a str"):
        OutfeedOptimizer(inner, "queue")


def test_the_mode_is_a_mode(inner):
    with pytest.raises(UsageTypeError, match="outfeed_optimizer_mode"):
        OutfeedOptimizer(inner, MaybeOutfeedQueue(), "before_apply")


def test_the_model_has_the_parameters(inner):
    with pytest.raises(UsageValueError, match="is not in the given model"):
        OutfeedOptimizer(inner, MaybeOutfeedQueue(), model=nn.Linear(2, 2))
    with pytest.raises(UsageTypeError, match=r"has to be a torch\.nn\.Module"):
        OutfeedOptimizer(inner, MaybeOutfeedQueue(), model="model")


def test_dry_run_lists_gradients_last_parameter_first(inner, model, capsys):
    queue = MaybeOutfeedQueue(filters=["weight"])
    text = OutfeedOptimizer(inner, queue, model=model).dry_run()
    assert capsys.readouterr().out == text + "\n"
    rows = [line.split() for line in text.splitlines()]
    assert [row[0] for row in rows[1:5]] == [
        "2.bias_grad",
        "2.weight_grad",
        "0.bias_grad",
        "0.weight_grad",
    ]
    assert [row[-1] for row in rows[1:5]] == ["no", "yes", "no", "yes"]
    assert text.splitlines()[-1] == "2 of 4 keys are observed, 32 bytes per step."


def test_dry_run_needs_the_model(outer):
    with pytest.raises(UsageValueError, match="the model must be specified"):
        outer.dry_run()


def test_both_names_of_each_gradient(model):
    assert poptorch.gradient_names(model) == {
        "2.bias_grad": "Gradient___2.bias",
        "2.weight_grad": "Gradient___2.weight",
        "0.bias_grad": "Gradient___0.bias",
        "0.weight_grad": "Gradient___0.weight",
    }


def test_filters_may_use_the_names_of_anchors(inner, model):
    queue = MaybeOutfeedQueue(filters=["Gradient___2.w", "Gradient___0.bias"])
    text = OutfeedOptimizer(inner, queue, model=model).dry_run()
    assert [line.split()[0] for line in text.splitlines() if line.endswith("yes")] == [
        "2.weight_grad",
        "0.bias_grad",
    ]


def test_an_inner_wrapper_uses_the_names_of_the_outer_ones_model(inner, model):
    outer = OutfeedOptimizer(
        OutfeedOptimizer(inner, MaybeOutfeedQueue(), AFTER), MaybeOutfeedQueue(), model=model
    )
    first, second = unwrapped(outer)[1]
    assert first.names == second.names != {}
