"""MultiConv: its checks, and that it changes no value."""

import pytest
import torch

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.annotations.models import IMAGES, Model, X, inference


def two(group):
    def function(model, x):
        with group:
            x = x + 1
            return model.left(x), torch.relu(model.right(x))

    return function


def grouped():
    return (
        poptorch.MultiConv()
        .availableMemoryProportions((0.1, 0.2))
        .partialsTypes([torch.float, torch.half])
        .enableConvDithering(True)
        .planType(poptorch.MultiConvPlanType.Serial)
        .perConvReservedTiles(2)
        .cycleBackOff(0.1)
    )


def test_a_group_changes_no_value():
    ours = inference(two(grouped()))(IMAGES)
    expected = inference(lambda m, x: (m.left(x + 1), torch.relu(m.right(x + 1))))(IMAGES)
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))


def test_convolutions_know_their_group_and_other_ops_have_none():
    group = grouped()

    def function(model, x):
        y = model.left(x)
        first = two(group)(model, x)
        return y, *first, *two(group)(model, x)

    model = inference(function)
    model.compile(IMAGES)
    ops = model.compiled.program.graph.ops
    groups = [op.origin.multi_conv for op in ops if op.kind == "convolution"]
    assert groups == [0, 1, 1, 2, 2]
    assert {op.origin.multi_conv for op in ops if op.name.startswith(("Add", "Relu"))} == {0}


def test_gradients_of_grouped_convolutions():
    def function(model, x):
        left, right = two(poptorch.MultiConv())(model, x)
        return poptorch.identity_loss(left.sum() + right.square().sum(), "none")

    torch.manual_seed(1)
    module = Model(function)
    options = make_options()
    options.anchorTensor("gradient", "Gradient___right.weight")
    model = poptorch.trainingModel(module, options, poptorch.optim.SGD(module.parameters(), lr=0))
    model(IMAGES)
    torch.manual_seed(1)
    twin = Model(function)
    twin(IMAGES).backward()
    torch.testing.assert_close(model.getAnchoredTensor("gradient"), twin.right.weight.grad)


def test_groups_inside_of_each_other():
    def function(model, x):
        with poptorch.MultiConv():
            return two(poptorch.MultiConv())(model, x)

    with pytest.raises(poptorch.Error, match=r"Nested poptorch\.MultiConv is not supported\."):
        inference(function)(IMAGES)


def test_a_group_without_convolutions():
    def function(model, x):
        with poptorch.MultiConv():
            return model.fc(x)

    with pytest.raises(poptorch.Error, match="Unexpected end_multi_conv"):
        inference(function)(X)


def test_an_error_inside_of_a_group_is_that_of_the_user():
    failing = [True]

    def function(model, x):
        with poptorch.MultiConv():
            if failing:
                raise KeyError("mine")
            return model.left(x)

    model = inference(function)
    with pytest.raises(KeyError, match="mine"):
        model(IMAGES)
    failing.clear()
    assert model(IMAGES).shape == (2, 2, 6)


@pytest.mark.parametrize(
    ("setter", "value"),
    [
        ("availableMemoryProportions", [0.1, 0.2, 0.3]),
        ("partialsTypes", (torch.half,)),
        ("enableConvDithering", []),
    ],
)
def test_a_list_has_an_entry_for_each_convolution(setter, value):
    group = getattr(poptorch.MultiConv(), setter)(value)
    message = rf"MultiConv\.{setter}: {len(value)} entries for the 2 convolutions"
    with pytest.raises(poptorch.Error, match=message):
        inference(two(group))(IMAGES)


@pytest.mark.parametrize(
    ("setter", "value", "kind", "message"),
    [
        ("availableMemoryProportions", "a", AssertionError, "Invalid available memory proportion"),
        ("availableMemoryProportions", [0.1, None], AssertionError, "Invalid available memory"),
        ("partialsTypes", torch.int32, ValueError, "Invalid partials types"),
        ("partialsTypes", [torch.half, "half"], ValueError, "Invalid partials types"),
        ("enableConvDithering", 1, ValueError, "enableConvDithering"),
        ("enableConvDithering", [True, 0], ValueError, "enableConvDithering"),
        ("planType", 0, AssertionError, "Invalid plan type"),
        ("perConvReservedTiles", 1.5, AssertionError, "perConvReservedTiles"),
        ("cycleBackOff", "a", AssertionError, "cycleBackOff"),
    ],
)
def test_settings_of_another_type(setter, value, kind, message):
    with pytest.raises(kind, match=message) as caught:
        getattr(poptorch.MultiConv(), setter)(value)
    assert isinstance(caught.value, poptorch.Error)


def test_outside_of_a_model_a_group_does_nothing():
    with poptorch.MultiConv(), poptorch.MultiConv().availableMemoryProportions([0.1]):
        assert (X + 1).shape == X.shape
