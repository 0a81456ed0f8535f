"""Elements combined at positions: scatter_add, scatter_reduce, index_add, gradients of gathers."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from tests.ops.one_op import LAYOUTS, run_op
from tests.options import make_options

FUNCTIONS = ("sum", "prod", "mean", "amax", "amin")
SHAPES = [((40,), 0), ((30, 20), 0), ((30, 20), 1), ((5, 30, 4, 6), 1), ((5, 6, 7), 2)]


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def whole(limit, *shape):
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(2))


def scatter(x, index, source, axis, function, **settings):
    attributes = {"axis": axis, "function": function, **settings}
    return run_op("scatter_reduce", [x, index, source], [(x.dtype, x.shape)], **attributes)[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_values(shape, axis, function, include_self, layout):
    x, source, index = normal(*shape), normal(*shape) * 2, whole(shape[axis], *shape)
    y = scatter(layout(x), layout(index), layout(source), axis, function, include_self=include_self)
    expected = x.double().scatter_reduce(
        axis, index, source.double(), function, include_self=include_self
    )
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_sums_have_the_bits_of_pytorch(dtype):
    x, source, index = normal(50, 64), normal(900, 64), whole(50, 900)
    wide = index.to(dtype)[:, None].expand(900, 64)
    y = scatter(x, wide, source, 0, "sum")
    assert torch.equal(y, x.index_add(0, index, source))


def test_the_index_may_be_smaller_than_the_source():
    x, source, index = normal(6, 9), normal(8, 7), whole(9, 4, 5)
    torch.testing.assert_close(scatter(x, index, source, 1, "sum"), x.scatter_add(1, index, source))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_half_precision_rounds_once(function):
    x, source, index = normal(30, 20).half(), normal(400, 20).half(), whole(30, 400, 20)
    y = scatter(x, index, source, 0, function)
    expected = x.double().scatter_reduce(0, index, source.double(), function)
    torch.testing.assert_close(y.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("function", ["amax", "amin"])
def test_nan_is_the_most_extreme_number(function):
    x, source = torch.zeros(3), torch.tensor([1.0, torch.nan, -1.0, torch.inf])
    index = torch.tensor([0, 1, 1, 2])
    y = scatter(x, index, source, 0, function)
    torch.testing.assert_close(y, x.scatter_reduce(0, index, source, function), equal_nan=True)


@pytest.mark.parametrize("position", [-7, 6, 2**62, -(2**63)])
@pytest.mark.parametrize("wraps", [False, True])
def test_a_position_out_of_range(position, wraps):
    x, index = normal(6, 4), torch.zeros(3, 4, dtype=torch.int64)
    index[1, 2] = position
    message = rf"index {position} is out of bounds for dimension 0 with size 6"
    with pytest.raises(poptorch.Error, match=message):
        scatter(x, index, normal(3, 4), 0, "sum", wraps=wraps, has_reference=False)


def test_negative_positions_count_from_the_end_if_asked():
    x, source, index = normal(6, 4), normal(3, 4), torch.tensor([[-1], [-6], [2]]).expand(3, 4)
    expected = x.index_put((index[:, 0],), source, accumulate=True)
    assert torch.equal(scatter(x, index, source, 0, "sum", wraps=True), expected)


@pytest.mark.parametrize(
    ("index", "source", "axis", "message"),
    [
        ((3, 4), (3, 4), 2, "input 0 has an axis 2"),
        ((3,), (3, 4), 0, "the same number of axes"),
        ((3, 5), (3, 5), 0, "no axis of input 1 is longer"),
        ((7, 4), (6, 4), 0, "no axis of input 1 is longer"),
    ],
)
def test_wrong_shapes(index, source, axis, message):
    with pytest.raises(InternalError, match=message):
        scatter(normal(6, 4), whole(6, *index), normal(*source), axis, "sum")


class Model(nn.Module):
    def __init__(self, function, shape):
        super().__init__()
        self.weight = nn.Parameter(normal(*shape))
        self._function = function

    def forward(self, i):
        y = self._function(self.weight, i)
        return y, poptorch.identity_loss((y * y.sin()).sum(), "none")


CALLS = {
    "scatter_add": lambda w, i: w.new_zeros(6, 4).scatter_add(0, i[:, None].expand(-1, 4), w),
    "scatter_reduce": lambda w, i: w.new_zeros(6, 4).scatter_reduce(
        0, i[:, None].expand(-1, 4), w, "mean", include_self=False
    ),
    "index_add": lambda w, i: w.new_zeros(6, 4).index_add(0, i, w),
    "index_add of columns": lambda w, i: w.new_zeros(4, 6).index_add(1, i, w.t()),
    "index_reduce": lambda w, i: w.new_ones(6, 4).index_reduce(0, i, w.detach(), "prod") + w.sum(),
    "index_put": lambda w, i: w.new_zeros(6, 4).index_put((i,), w, accumulate=True),
    "gather": lambda w, i: w.gather(0, i[:, None].expand(-1, 4)),
    "index_select": lambda w, i: w.index_select(0, i),
    "index": lambda w, i: w[i - 2],
    "index of columns": lambda w, i: w[:, i[:3] % 4],
    "index with a matrix": lambda w, i: w[i.reshape(2, 4)],
    "an axis in the middle": lambda w, i: w.reshape(2, 4, 4)[:, i.reshape(2, 4) % 4],
    "cummax": lambda w, i: w.cummax(0)[0],
}


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.parametrize("name", CALLS)
def test_training(name):
    function, i = CALLS[name], whole(6, 8)
    module, eager = Model(function, (8, 4)), Model(function, (8, 4))
    options = make_options()
    options.anchorTensor("gradient", "Gradient___weight")
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.0))
    y, _ = model(i)
    expected, loss = eager(i)
    loss.backward()
    torch.testing.assert_close(y, expected.detach())
    gradient = model.getAnchoredTensor("gradient")
    torch.testing.assert_close(gradient, eager.weight.grad, rtol=1e-4, atol=1e-4)
    assert "scatter_reduce(" in str(model.program())
