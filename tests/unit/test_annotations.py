"""MultiConv, marks of overlap, autocast, and marks that are identities: checks, and no effect."""

import collections
import re

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OverlapMode
from tests.options import make_options


class Model(nn.Module):
    """Two convolutions and a product, called by ``function(model, *inputs)``."""

    def __init__(self, function):
        super().__init__()
        self.left, self.right = nn.Conv1d(3, 2, 3), nn.ConvTranspose1d(3, 2, 3)
        self.fc = nn.Linear(3, 2)
        self._function = function

    def forward(self, *args):
        return self._function(self, *args)


def inference(function, options=None):
    torch.manual_seed(1)
    return poptorch.inferenceModel(Model(function), options or make_options())


IMAGES = torch.randn(2, 3, 8)
X = torch.randn(4, 3)


# MultiConv


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


# Overlap

LOOP = OverlapMode.OverlapDeviceIterationLoop
mark_input, mark_output = poptorch.set_overlap_for_input, poptorch.set_overlap_for_output


def overlapping(mode=poptorch.OutputMode.All, num_tiles=32, *, pipelined=False):
    """Return options that allow overlap, but for what is asked for otherwise."""
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

    y, before, behind = inference(function, overlapping())(X)
    assert torch.equal(before, behind)
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


# Autocast


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", "cuda", "ipu"])
def test_autocast_chooses_no_types(device, dtype):
    def function(model, x):
        with torch.autocast(device, dtype=dtype):
            y = model.fc(x)
            with torch.autocast(device, enabled=False):
                return torch.softmax(y, -1), y @ y.t()

    def plain(model, x):
        y = model.fc(x)
        return torch.softmax(y, -1), y @ y.t()

    ours, expected = inference(function)(X), inference(plain)(X)
    assert all(torch.equal(*pair) for pair in zip(ours, expected, strict=True))


@pytest.mark.parametrize("device", ["cpu", "ipu"])
def test_autocast_as_a_decorator_and_around_a_call(device):
    expected = inference(lambda m, x: m.fc(x))(X)
    decorated = torch.autocast(device, dtype=torch.bfloat16)(lambda m, x: m.fc(x))
    assert torch.equal(inference(decorated)(X), expected)
    model = inference(lambda m, x: m.fc(x))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(model(X), expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # it is itself again
        assert nn.Linear(3, 2)(X).dtype == torch.bfloat16


def test_autocast_around_a_call_leaves_kernels_of_pytorch_alone():
    x = torch.randn(4, 3)
    model = inference(lambda m, x: torch.addbmm(x[:2], x.view(2, 2, 3), x.view(2, 3, 2) @ x[:2]))
    expected = model(x)
    assert any(op.kind == "aten" for op in model.compiled.program.graph.ops)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(model(x), expected)


def test_autocast_in_training():
    def function(model, x):
        with torch.autocast("ipu", dtype=torch.float16):
            return poptorch.identity_loss(model.fc(x).square().sum(), "none")

    torch.manual_seed(1)
    module = Model(function)
    options = make_options()
    options.anchorTensor("gradient", "Gradient___fc.weight")
    model = poptorch.trainingModel(module, options, poptorch.optim.SGD(module.parameters(), lr=0))
    loss = model(X)
    weight = module.fc.weight.detach().clone().requires_grad_()
    expected = nn.functional.linear(X, weight, module.fc.bias.detach()).square().sum()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.getAnchoredTensor("gradient"), weight.grad)


# Identities

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
