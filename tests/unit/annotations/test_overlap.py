"""Marks of overlap: their checks in order, and that they change no value."""

import collections

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import OverlapMode
from tests.options import make_options
from tests.unit.annotations.models import Model, X, inference

LOOP = OverlapMode.OverlapDeviceIterationLoop
mark_input, mark_output = poptorch.set_overlap_for_input, poptorch.set_overlap_for_output


def overlapping(mode=poptorch.OutputMode.All, num_tiles=32, *, pipelined=False):
    """Return options that allow overlap, except for the settings that are passed."""
    options = make_options(2)
    options.outputMode(mode)
    if num_tiles:
        options.TensorLocations.numIOTiles(num_tiles)
    if not pipelined:
        options.setExecutionStrategy(poptorch.ShardedExecution())
    return options


def marked(model, x, mode=LOOP):
    return mark_output(model.fc(mark_input(x, mode)), mode)


@pytest.mark.parametrize("mode", OverlapMode)
def test_marks_change_no_value(mode):
    ours = inference(lambda m, x: marked(m, x, mode), overlapping())(X)
    assert torch.equal(ours, inference(lambda m, x: m.fc(x), overlapping())(X))


def test_marks_in_training():
    def function(model, x):
        y = mark_output(model.fc(mark_input(x, LOOP)), LOOP)
        return y, poptorch.identity_loss(y.sum(), "none")

    module = Model(function)
    options = overlapping(poptorch.OutputMode.Sum)
    model = poptorch.trainingModel(module, options, poptorch.optim.SGD(module.parameters(), lr=0))
    y, _ = model(X)
    torch.testing.assert_close(y, module.fc(X).view(2, 2, 2).sum(0))


Pair = collections.namedtuple("Pair", ["one", "other"])


@pytest.mark.parametrize(
    "nested",
    [
        lambda x, y: (x, [y]),
        lambda x, y: [x, {"y": y, "text": "a"}, None, 3],
        lambda x, y: {"a": (x,), "b": y},
        lambda x, y: Pair(x, [y]),
        lambda x, y: collections.OrderedDict(x=x, y=y),
    ],
)
def test_structures_come_back_as_they_are(nested):
    seen = []

    def function(model, x, y):
        given = nested(x, y)
        result = mark_input(given, LOOP)
        seen.append((given, result))
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(leaf)]
        return mark_output(tuple(leaf * 2 for leaf in leaves), LOOP)

    out = inference(function, overlapping())(X, X + 1)
    assert torch.equal(out[0], 2 * X) and torch.equal(out[1], 2 * (X + 1))
    (given, result), *_ = seen
    assert type(result) is type(given)
    assert torch.utils._pytree.tree_structure(given) == torch.utils._pytree.tree_structure(result)


def used_twice(model, x):
    return model.fc(mark_input(x, OverlapMode.NoOverlap)) + x.sum()


def returned_as_well(model, x):
    return mark_input(x, OverlapMode.NoOverlap) + 1, x


def returned_twice(model, x):
    y = mark_output(model.fc(x), OverlapMode.NoOverlap)
    return y, y


def no_input(model, x):
    return mark_input(model.fc(x), OverlapMode.NoOverlap)


def weight_as_input(model, x):
    return x @ mark_input(model.fc.weight, OverlapMode.NoOverlap).t()


def constant_as_input(model, x):
    return x + mark_input(torch.ones(4, 3), OverlapMode.NoOverlap)


def no_output(model, x):
    return mark_output(model.fc(x), OverlapMode.NoOverlap) + 1


def dropped(model, x):
    y = model.fc(x)
    mark_output(y, OverlapMode.NoOverlap)
    return y


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (used_twice, "must be the only op applied to an input, .*'x'.*sum"),
        (returned_as_well, "must be the only op applied to an input, .*'x'.*output"),
        (returned_twice, "returned twice"),
        (no_input, "not a tensor input to the model"),
        (weight_as_input, "not a tensor input to the model"),
        (constant_as_input, "not a tensor input to the model"),
        (no_output, "not a tensor output to the model"),
        (dropped, "not a tensor output to the model"),
    ],
)
def test_what_is_marked_whatever_the_mode(function, message):
    class Named(Model):
        def forward(self, x):
            return self._function(self, x)

    model = poptorch.inferenceModel(Named(function), make_options())
    with pytest.raises(poptorch.Error, match=message):
        model(X)


def test_other_ops_may_read_an_output():
    def function(model, x):
        y = model.fc(x)
        before = y.sum()
        y = mark_output(y, LOOP)
        return y, before, y.sum()

    y, before, after = inference(function, overlapping())(X)
    assert torch.equal(before, after)
    assert torch.equal(y, inference(lambda m, x: m.fc(x), overlapping())(X))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pipelined": True, "num_tiles": 0},
            r"Overlapped IO is not supported with poptorch\.PipelinedExecution.*ShardedExecution",
        ),
        (
            {"num_tiles": 0, "mode": poptorch.OutputMode.Final},
            "No IO tiles allocated.*at least 32",
        ),
        ({"mode": poptorch.OutputMode.Final}, "Unsupported output mode Final"),
    ],
)
def test_what_options_have_to_say(options, message):
    model = inference(marked, overlapping(**options))
    with pytest.raises(poptorch.Error, match=message):
        model(X)
    nothing = inference(lambda m, x: marked(m, x, OverlapMode.NoOverlap), overlapping(**options))
    assert nothing(X).shape[1] == 2


def test_the_default_output_mode_of_training_is_one_that_does_not_do():
    options = make_options().setExecutionStrategy(poptorch.ShardedExecution())
    options.TensorLocations.numIOTiles(64)
    model = poptorch.trainingModel(
        Model(lambda m, x: mark_output(poptorch.identity_loss(m.fc(x), "sum"), LOOP)), options
    )
    with pytest.raises(poptorch.Error, match="Unsupported output mode Final"):
        model(X)


def test_mistakes_are_told_in_the_order_of_the_contract():
    def everything(model, x):
        y = mark_output(model.fc(mark_input(x, LOOP)), LOOP)
        mark_input(y, LOOP)
        return y, y, x

    def without_use(model, x):
        y = mark_output(model.fc(mark_input(x, LOOP)), LOOP)
        mark_input(y, LOOP)
        return y, y

    def without_twice(model, x):
        y = mark_output(model.fc(mark_input(x, LOOP)), LOOP)
        mark_input(y, LOOP)
        return y

    for function, message in (
        (everything, "only op applied"),
        (without_use, "returned twice"),
        (without_twice, "not a tensor input"),
        (marked, "Overlapped IO"),
    ):
        with pytest.raises(poptorch.Error, match=message):
            inference(function)(X)


@pytest.mark.parametrize("mark", [mark_input, mark_output])
def test_a_mode_of_another_type(mark):
    with pytest.raises(AssertionError, match=r"must be a poptorch\.OverlapMode"):
        mark(X, "overlap")


def test_outside_of_a_model_marks_do_nothing():
    given = [X, (X, 3)]
    assert mark_input(given, LOOP) is given
    assert mark_output(X, LOOP) is X
