"""Thirty faults, each planted in a model of its own, and the verdict about each of them."""

import copy
import math

import pytest
import torch

import popsim_torch as poptorch
from tests.options import make_options
from tests.parity.watch.planted import PLANTED, Planted


def healthy_inputs(planted: Planted) -> tuple[torch.Tensor, ...]:
    """Return inputs of the same shapes; whether they are healthy is for the model to say."""
    return tuple(torch.ones_like(one) for one in planted.inputs())


def train_until_bad(planted: Planted, **watch):
    """Return the model, its weights before the call, and the error of the call."""
    torch.manual_seed(2)
    model = planted.make()
    options = make_options(seed=7)
    planted.options(options)
    options.watch(**watch)
    training = poptorch.trainingModel(model, options, planted.optimizer(model))
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(poptorch.BadNumberError) as caught:
        training(*planted.inputs())
    return training, before, caught.value


@pytest.mark.parametrize("name", PLANTED)
def test_the_verdict_names_the_fault(name):
    planted = PLANTED[name]
    training, before, error = train_until_bad(planted)
    verdict = error.verdict
    print(verdict)
    found = {field: getattr(verdict, field) for field in planted.expected}
    assert found == planted.expected
    assert planted.rule in verdict.rule
    assert not math.isfinite(verdict.value)
    assert str(verdict) in str(error)
    if planted.expected.get("iteration", 0) == 0:
        # The weights are those before the bad iteration, and the model can be read and called.
        for key, value in training.model.state_dict().items():
            assert torch.equal(value, before[key]) or value.isnan().any(), key
    training.destroy()


def test_there_are_thirty_faults():
    assert len(PLANTED) >= 30


@pytest.mark.parametrize("name", ["division by zero", "micro-batch 3 of 4", "velocities"])
def test_the_model_can_be_used_after_the_error(name):
    planted = PLANTED[name]
    training, _, error = train_until_bad(planted)
    with pytest.raises(poptorch.BadNumberError) as again:
        training(*planted.inputs())
    assert str(again.value) == str(error)
    fine = healthy_inputs(planted)
    before = training.model.last.weight.clone()
    assert training(*fine).isfinite().all()
    assert not torch.equal(training.model.last.weight, before)


def test_iterations_before_the_bad_one_have_trained():
    planted = PLANTED["iteration 5 of 8"]
    training, before, _ = train_until_bad(planted)
    torch.manual_seed(2)
    model = planted.make()
    options = make_options(d=5, seed=7)
    twin = poptorch.trainingModel(model, options, planted.optimizer(model))
    twin(planted.inputs()[0][:10])
    after = training.model.state_dict()
    for key, value in model.state_dict().items():
        assert torch.equal(after[key], value), key
    assert not torch.equal(after["first.weight"], before["first.weight"])
