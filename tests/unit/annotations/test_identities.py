"""Marks that pass tensors on unchanged, and their checks."""

import re

import pytest
import torch

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.annotations.models import Model, X, inference

MARKS = {
    "nop": poptorch.nop,
    "memory": lambda x: poptorch.set_available_memory(x, 7.5),
    "one": poptorch.recomputationCheckpoint,
    "list": lambda x: poptorch.recomputationCheckpoint([x])[0],
    "several": lambda x: poptorch.recomputationCheckpoint(x, x)[1],
}


@pytest.mark.parametrize("name", MARKS)
def test_marks_are_identities(name):
    mark = MARKS[name]
    assert mark(X) is X
    ours = inference(lambda m, x: mark(m.fc(mark(x))))(X)
    assert torch.equal(ours, inference(lambda m, x: m.fc(x))(X))


@pytest.mark.parametrize("given", [(), [], (X,), [X, X]])
def test_what_a_checkpoint_of_a_list_returns(given):
    assert poptorch.recomputationCheckpoint(given) is given


def test_several_checkpoints_are_a_tuple():
    assert type(poptorch.recomputationCheckpoint(X, X)) is tuple


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: poptorch.nop(1), poptorch.Error),
        (lambda: poptorch.set_available_memory([X], 0.1), poptorch.Error),
        (lambda: poptorch.recomputationCheckpoint(X, 1), ValueError),
        (lambda: poptorch.recomputationCheckpoint([X, None]), ValueError),
        (lambda: poptorch.NameScope(3), AssertionError),
        (lambda: poptorch.Attribute(__outline="a"), TypeError),
        (lambda: poptorch.identity_loss(X, "max"), AssertionError),
        (lambda: poptorch.identity_loss(1.0, "sum"), poptorch.Error),
    ],
)
def test_arguments_of_another_type(call, kind):
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, poptorch.Error)
    with pytest.raises(kind, match=re.escape(str(caught.value.message)[:20])):
        inference(lambda m, x: call())(X)


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_identity_loss_of_every_reduction(reduction):
    x = torch.randn(6, requires_grad=True)
    loss = poptorch.identity_loss(x * 2, reduction)
    expected = {"sum": (2 * x).sum(), "mean": (2 * x).mean(), "none": 2 * x}[reduction]
    assert torch.equal(loss, expected)

    def function(model, x):
        y = poptorch.identity_loss(model.fc(x), reduction)
        return y, poptorch.identity_loss(y, "sum")

    torch.manual_seed(1)
    module = Model(function)
    options = make_options()
    options.anchorTensor("gradient", "Gradient___fc.weight")
    model = poptorch.trainingModel(module, options, poptorch.optim.SGD(module.parameters(), lr=0))
    ours, _ = model(X)
    torch.manual_seed(1)
    twin = Model(function)
    expected, total = twin(X)
    total.backward()
    torch.testing.assert_close(ours, expected.detach())
    torch.testing.assert_close(model.getAnchoredTensor("gradient"), twin.fc.weight.grad)
