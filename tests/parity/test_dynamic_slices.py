"""dynamic_slice, dynamic_update and slices ``t[x:x + k]`` in a model."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

STARTS = (0, 3, 7, 11, -2)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float16)


class Model(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def inference(function):
    return poptorch.inferenceModel(Model(function), make_options())


def wrapped(start, size, length, step=1):
    return [(int(start) + i) % length for i in range(0, size, step)]


X = torch.arange(4 * 12 * 3.0).reshape(4, 12, 3)


@pytest.mark.parametrize("step", [1, 2, 3])
def test_one_program_slices_where_each_run_says(step):
    model = inference(lambda x, start: poptorch.dynamic_slice(x, 1, start, 4, step))
    for start in STARTS:
        out = model(X, torch.tensor([start]))
        assert torch.equal(out, X[:, wrapped(start, 4, 12, step)])


@pytest.mark.parametrize("dim", [1, -2])
def test_one_program_updates_where_each_run_says(dim):
    model = inference(lambda x, src, start: poptorch.dynamic_update(x, src, dim, start, 5))
    src = -X[:, :5]
    for start in STARTS:
        expected = X.clone()
        expected[:, wrapped(start, 5, 12)] = src
        assert torch.equal(model(X, src, torch.tensor([start])), expected)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_starts_of_every_width(dtype):
    model = inference(lambda x, start: poptorch.dynamic_slice(x, 1, start, 4, 1))
    for start in (2, 10):
        out = model(X, torch.tensor([start], dtype=dtype))
        assert torch.equal(out, X[:, wrapped(start, 4, 12)])


@pytest.mark.parametrize("dtype", (*FLOATS, *INTEGERS, torch.bool), ids=str)
def test_tensors_of_every_type(dtype):
    def both(x, start):
        part = poptorch.dynamic_slice(x, 0, start, 6, 1)
        return part, poptorch.dynamic_update(x, part.flip(0), 0, start, 6)

    x = torch.arange(12).remainder(2 if dtype == torch.bool else 100).to(dtype)
    part, updated = inference(both)(x, torch.tensor([9]))
    where = wrapped(9, 6, 12)
    expected = x.clone()
    expected[where] = x[where].flip(0)
    assert torch.equal(part.to(dtype), x[where])
    assert torch.equal(updated.to(dtype), expected)


def test_integers_of_two_widths_that_forward_sees_as_one():
    def function(x, src, start):
        assert x.dtype == src.dtype == torch.int32
        return poptorch.dynamic_update(x, src, 0, start, 2)

    for types in ((torch.int64, torch.int32), (torch.int32, torch.int64)):
        x, src = torch.arange(6).to(types[0]), torch.tensor([70, 80]).to(types[1])
        out = inference(function)(x, src, torch.tensor(5))
        assert out.tolist() == [80, 1, 2, 3, 4, 70]


def test_constants_of_the_host():
    table, src = torch.arange(12.0, dtype=torch.float64), -torch.ones(2, dtype=torch.int64)

    def function(x, start):
        return poptorch.dynamic_slice(table, 0, start, 3, 1), poptorch.dynamic_update(
            x, src, 0, start, 2
        )

    read, updated = inference(function)(torch.arange(5), torch.tensor(4))
    assert read.tolist() == [4.0, 5.0, 6.0]
    assert updated.tolist() == [-1, 1, 2, 3, -1]


def test_a_start_that_is_known():
    model = inference(lambda x: poptorch.dynamic_slice(x, 1, torch.tensor(10), 4, 1))
    assert torch.equal(model(X), X[:, wrapped(10, 4, 12)])


def test_a_start_that_is_computed():
    model = inference(lambda x, i: poptorch.dynamic_slice(x, 1, i.sum() * 2, 4, 1))
    assert torch.equal(model(X, torch.tensor([2, 1])), X[:, 6:10])


class Trained(nn.Module):
    """Learns what is sliced and what replaces a slice."""

    def __init__(self, function, *parameters):
        super().__init__()
        self.parts = nn.ParameterList(parameters)
        self._function = function

    def forward(self, *args):
        y = self._function(*self.parts, *args)
        weights = torch.arange(1.0, 1 + y.numel(), device=y.device).view(y.shape)
        return y, poptorch.identity_loss((y.float() * weights).sum(), "none")


def gradients(model, *args):
    options = make_options()
    for i in range(len(model.parts)):
        options.anchorTensor(str(i), f"Gradient___parts.{i}")
    training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0))
    training(*args)
    return [training.getAnchoredTensor(str(i)) for i in range(len(model.parts))]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("start", STARTS)
def test_gradient_of_a_slice(start, step, dtype):
    model = Trained(
        lambda x, start: poptorch.dynamic_slice(x, 1, start, 4, step), torch.randn(2, 12).to(dtype)
    )
    (gradient,) = gradients(model, torch.tensor([start]))
    where = wrapped(start, 4, 12, step)
    expected = torch.zeros(2, 12, dtype=dtype)
    expected[:, where] = torch.arange(1.0, 1 + 2 * len(where)).view(2, -1).to(dtype)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("start", STARTS)
def test_gradients_of_an_update(start, dtype):
    model = Trained(
        lambda x, src, start: poptorch.dynamic_update(x, src, 1, start, 5),
        *(torch.randn(2, size).to(dtype) for size in (12, 5)),
    )
    of_x, of_src = gradients(model, torch.tensor([start]))
    where = wrapped(start, 5, 12)
    expected = torch.arange(1.0, 25).view(2, 12).to(dtype)
    assert torch.equal(of_src, expected[:, where])
    expected[:, where] = 0
    assert torch.equal(of_x, expected)


# t[x:x + k]

SLICES = {
    "from": (lambda t, x: t[:, x : x + 4], lambda t, x: t[:, wrapped(x, 4, 12)]),
    "steps": (lambda t, x: t[:, x : x + 5 : 2], lambda t, x: t[:, wrapped(x, 5, 12, 2)]),
    "before": (lambda t, x: t[:, x - 3 : x], lambda t, x: t[:, wrapped(x - 3, 3, 12)]),
    "moved": (
        lambda t, x: t[:, x * 2 + 1 : x * 2 + 5],
        lambda t, x: t[:, wrapped(2 * x + 1, 4, 12)],
    ),
    "element": (lambda t, x: t[:, x[0] : x[0] + 2], lambda t, x: t[:, wrapped(x, 2, 12)]),
    "ellipsis": (
        lambda t, x: t[0, ..., x : x + 2],
        lambda t, x: t[0][:, wrapped(x, 2, 3)],
    ),
    "others": (
        lambda t, x: t[None, 1:3, x : x + 4, ::2],
        lambda t, x: t[None, 1:3, wrapped(x, 4, 12), ::2],
    ),
    "two": (
        lambda t, x: t[x : x + 2, x + 1 : x + 3],
        lambda t, x: t[wrapped(x, 2, 4)][:, wrapped(x + 1, 2, 12)],
    ),
    "changed before": (
        lambda t, x: (x := x.clone().add_(1)) is not None and t[:, x : x + 4],
        lambda t, x: t[:, wrapped(x + 1, 4, 12)],
    ),
}


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_from_a_tensor_to_a_constant_behind_it(name):
    ours, expected = SLICES[name]
    model = inference(ours)
    for start in STARTS:
        out = model(X, torch.tensor([start]))
        assert torch.equal(out, expected(X, start)), start


POSITIONS = {
    "first": lambda t, x: t[x],
    "last": lambda t, x: t[..., x],
    "computed": lambda t, x: t[2 - x],
    "two": lambda t, x: t[x, :, x],
    "with_others": lambda t, x: t[None, x, 2:4, -1],
    "with_a_list": lambda t, x: t[x, [0, 2, 2]],
}


@pytest.mark.parametrize("name", POSITIONS)
def test_a_position_that_each_run_tells(name):
    model = inference(POSITIONS[name])
    for position in (0, 2, -1):
        x = torch.tensor(position)
        assert torch.equal(model(X, x), POSITIONS[name](X, x))


@pytest.mark.parametrize("index", [lambda x: x, lambda x: (..., x, 1), lambda x: (x, slice(2, 4))])
def test_assignment_to_a_position(index):
    model = inference(assign(index, lambda v: v))
    for position in (0, 2, -1):
        expected = X.clone()
        expected[index(position)] = -7
        assert torch.equal(model(X, torch.tensor(position), torch.tensor(-7.0)), expected)


def test_rows_that_a_loop_counts():
    def rows(x):
        def body(i, result):
            result[i] = x[i] * x[i]
            return i + 1, result

        return poptorch.for_loop(4, body, [torch.tensor(0), torch.zeros_like(x)])[1]

    model = Trained(rows, X[:, 0])
    (gradient,) = gradients(model)
    assert torch.equal(gradient, 2 * X[:, 0] * torch.arange(1.0, 13).view(4, 3))


def test_more_positions_than_axes():
    with pytest.raises(IndexError, match="too many indices"):
        inference(lambda t, x: t[x, x])(torch.ones(3), torch.tensor(1))


def assign(index, value):
    def function(t, x, v):
        t = t.clone()
        t[index(x)] = value(v)
        return t * 1

    return function


ASSIGNED = {
    "slice": (lambda x: (slice(None), slice(x, x + 4)), lambda v: v),
    "number": (lambda x: (slice(None), slice(x, x + 4)), lambda v: 7.0),
    "row": (lambda x: (slice(None), slice(x, x + 4)), lambda v: v[0, 0]),
    "element": (lambda x: (2, slice(x, x + 4), 1), lambda v: v[0, :, 0]),
    "two": (lambda x: (slice(x, x + 2), slice(x + 1, x + 5)), lambda v: v[:2]),
}


@pytest.mark.parametrize("name", ASSIGNED)
def test_assignment_to_a_slice(name):
    index, value = ASSIGNED[name]
    model = inference(assign(index, value))
    v = -torch.arange(1.0, 49).view(4, 4, 3)
    for start in STARTS:
        expected = X.clone()
        where = [
            torch.tensor(wrapped(item.start, item.stop - item.start, X.shape[axis]))
            if isinstance(item, slice) and item.start is not None
            else item
            for axis, item in enumerate(index(start))
        ]
        if name == "two":
            where = [where[0][:, None], where[1]]
        expected[tuple(where)] = value(v)
        assert torch.equal(model(X, torch.tensor(start), v), expected)


def test_assignment_to_a_slice_of_an_input_reaches_the_caller():
    def function(cache, entry, position):
        cache[position : position + 1] = entry
        return cache.sum()

    cache, model = torch.zeros(4, 2), inference(function)
    for position in (2, 0):
        total = model(cache, torch.full((1, 2), 1.0 + position), torch.tensor([position]))
    assert cache.tolist() == [[1, 1], [0, 0], [3, 3], [0, 0]] and float(total) == 8


def test_gradients_of_an_assignment_to_a_slice():
    def function(x, v, start):
        x = x * 1
        x[:, start : start + 3] = v
        return x

    model = Trained(function, torch.randn(2, 12), torch.randn(2, 3))
    of_x, of_v = gradients(model, torch.tensor([10]))
    expected, where = torch.arange(1.0, 25).view(2, 12), wrapped(10, 3, 12)
    assert torch.equal(of_v, expected[:, where])
    expected[:, where] = 0
    assert torch.equal(of_x, expected)


def test_a_slice_at_a_known_place_is_that_of_torch():
    def sliced(t):
        x = torch.tensor(10)
        return t[:, x : x + 4]

    assert torch.equal(inference(sliced)(X), X[:, 10:14])


def end_of_another(t, x):
    return t[:, x : 2 * x]


def no_start(t, x):
    return t[:, :x]


def changed_in_between(t, x):
    x = x.clone()
    end = x + 4
    x += 1
    return t[:, x:end]


def changed_behind_a_view(t, x):
    x = x.clone()
    first = x[0]
    end = first + 4
    x += 1
    return t[:, first:end]


def changed_copy_behind_a_view(t, x):
    x = x.clone()
    first = x.view(-1)
    end = first + 4
    x += 1
    return t[:, first:end]


def rounded(t, x):
    return t[:, (x / 3).int() : (x / 3 + 4).int()]


@pytest.mark.parametrize(
    "function",
    [
        *(end_of_another, no_start, rounded),
        *(changed_in_between, changed_behind_a_view, changed_copy_behind_a_view),
    ],
)
def test_a_length_that_only_a_run_tells(function):
    with pytest.raises(poptorch.Error, match="only supported in eager mode"):
        inference(function)(X, torch.tensor([2]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda t, x: t[:, x:x], "start and end of a slice must be different"),
        (lambda t, x: t[:, x : x - 2], "end less than the start"),
        (lambda t, x: t[:, x : x + 13], "A slice of 13 positions.*from 1 to 12"),
    ],
)
def test_slices_of_no_length(function, message):
    with pytest.raises(poptorch.Error, match=message):
        inference(function)(X, torch.tensor([2]))


# Mistakes

START = torch.tensor([1])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], 0, START, 2, 1), "the tensor must be a torch.Tensor"),
        ((X, 0, 1, 2, 1), "start must be a torch.Tensor"),
        ((X, 0.0, START, 2, 1), "dim must be an int"),
        ((X, 0, START, START, 1), "size must be an int"),
        ((X, 0, START, 2, 1.0), "step must be an int"),
        ((X, 0, START.float(), 2, 1), "start must be an integer tensor, got torch.float32"),
        ((X, 0, START.bool(), 2, 1), "start must be an integer tensor, got torch.bool"),
        ((X, 0, torch.tensor([1, 2]), 2, 1), r"start must be one number, got shape \(2,\)"),
        ((X, 3, START, 2, 1), "there is no dimension 3"),
        ((torch.tensor(1.0), 0, START, 1, 1), "there is no dimension 0"),
    ],
)
def test_arguments_of_a_slice(arguments, message):
    with pytest.raises(poptorch.Error, match=f"dynamic_slice: {message}"):
        poptorch.dynamic_slice(*arguments)


@pytest.mark.parametrize(
    ("size", "step", "message"),
    [
        (0, 1, "start and end of a slice must be different"),
        (-2, 1, "end less than the start"),
        (4, 0, "step is 0"),
        (4, -1, "step is -1"),
        (5, 1, r"\(5\) must be a factor of the slicing dimension.*12"),
        (24, 1, r"\(24\) must be a factor of the slicing dimension.*12"),
    ],
)
def test_slices_that_there_are_not(size, step, message):
    model = inference(lambda x, start: poptorch.dynamic_slice(x, 1, start, size, step))
    with pytest.raises(poptorch.Error, match=message):
        model(X, START)


@pytest.mark.parametrize(
    ("src", "size", "message"),
    [
        (X[:, :5, 0], 5, "must have same dimensionality.*3.*2"),
        (X[:, :5].half(), 5, "must have same dtype.*float32.*float16"),
        (X[:, :5], 0, "start and end of a slice must be different"),
        (X[:, :5], -1, "end less than the start"),
        (X[:, :5], 4, "src must have shape"),
        (X[:, :5, :2], 5, "src must have shape"),
        (torch.zeros(4, 13, 3), 13, "size may be from 1 to 12"),
    ],
)
def test_updates_that_there_are_not(src, size, message):
    model = inference(lambda x, src, start: poptorch.dynamic_update(x, src, 1, start, size))
    with pytest.raises(poptorch.Error, match=message):
        model(X, src, START)
    assert not model.isCompiled()


def test_types_in_messages_are_those_that_forward_sees():
    model = inference(lambda x, src: poptorch.dynamic_update(x, src, 0, src[0], 2))
    with pytest.raises(poptorch.Error, match=r"input is torch.float32, src is torch.int32"):
        model(torch.zeros(4), torch.tensor([1, 2]))


# Outside of a model


def test_outside_of_a_model_slices_end_at_the_end():
    assert torch.equal(poptorch.dynamic_slice(X, 1, torch.tensor(2), 4, 2), X[:, 2:6:2])
    assert torch.equal(poptorch.dynamic_slice(X, -2, torch.tensor([10]), 4, 1), X[:, 10:])
    assert torch.equal(poptorch.dynamic_slice(X, 1, torch.tensor(-3), 2, 1), X[:, 9:11])


def test_outside_of_a_model_an_update_is_slice_scatter():
    src = -X[:, :3]
    out = poptorch.dynamic_update(X, src, 1, torch.tensor(4), 3)
    assert torch.equal(out, torch.slice_scatter(X, src, 1, 4, 7))
