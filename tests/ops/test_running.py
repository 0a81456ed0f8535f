"""Running products, extremes and log-sums along an axis, against eager PyTorch."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from tests.ops.one_op import LAYOUTS, run_op
from tests.options import make_options

SHAPES = [((7,), 0), ((1, 1), 1), ((33, 20), 1), ((33, 20), 0), ((3, 19, 5, 29), 1), ((4, 300), 0)]


def sample(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def one(kind, x, axis):
    return run_op(kind, [x], [(x.dtype, x.shape)], axis=axis)[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_products_have_the_same_bits(shape, axis, layout):
    x = layout(sample(shape))
    torch.testing.assert_close(one("cumprod", x, axis), x.cumprod(axis), rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_logarithms_of_sums(shape, axis, layout):
    x = layout(sample(shape) * 30)
    expected = x.double().logcumsumexp(axis)
    y = one("logcumsumexp", x, axis)
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_logarithms_of_special_values(axis):
    infinity = torch.inf
    rows = torch.tensor(
        [
            [-infinity, -infinity, 1.0, -infinity, 2.0],
            [1.0, infinity, 2.0, infinity, -infinity],
            [1.0, torch.nan, 2.0, infinity, 0.0],
            [-1e30, 1e30, 3e38, -3e38, 3e38],
            [0.0, -1e-20, 1e-30, 1e-40, 0.0],
        ]
    )
    x = rows if axis == 1 else rows.t().contiguous()
    expected = x.logcumsumexp(axis)
    torch.testing.assert_close(one("logcumsumexp", x, axis), expected, equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("function", ["max", "min"])
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_extremes(shape, axis, function, layout):
    x = (sample(shape) * 3).round()  # with equal numbers
    x.view(-1)[x.numel() // 2] = torch.nan
    x = layout(x)
    expected = getattr(torch, f"cum{function}")(x, axis)
    types = [(x.dtype, shape), (torch.int64, shape)]
    y, positions = run_op("running_extreme", [x], types, axis=axis, function=function)
    torch.testing.assert_close(y, expected.values, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(positions, expected.indices)
    values = run_op("running_extreme", [x], [types[0], None], axis=axis, function=function)
    torch.testing.assert_close(values, [y], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("zeros", [(), (2,), (0, 4), (1, 2, 5), (5,)], ids=str)
@pytest.mark.parametrize(("shape", "axis"), [((6,), 0), ((6, 3), 0), ((3, 6), 1)], ids=str)
def test_the_gradient_of_products_with_zeros(shape, axis, zeros):
    x = sample(shape)
    x.index_fill_(axis, torch.tensor(zeros, dtype=torch.int64), 0.0)
    gradient = sample(shape).cos()
    wide = x.double().requires_grad_()
    wide.cumprod(axis).backward(gradient.double())
    inputs = [gradient, x, x.cumprod(axis)]
    (grad,) = run_op("cumprod_grad", inputs, [(x.dtype, shape)], axis=axis)
    torch.testing.assert_close(grad.double(), wide.grad, rtol=1e-5, atol=1e-5)


class Model(nn.Module):
    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.weight = nn.Parameter((1 + sample((6, 5)) / 4).to(dtype))
        self._function = function

    def forward(self, x):
        y = self._function(self.weight * x)
        return y, poptorch.identity_loss((y * y.sin()).float().sum(), "none")


CALLS = {
    "cumprod": (lambda x: x.cumprod(0), "cumprod_grad("),
    "torch.cumprod": (lambda x: torch.cumprod(x, dim=-1), "cumprod_grad("),
    "cumprod of another dtype": (lambda x: x.cumprod(0, dtype=torch.float32), "cumprod("),
    "cummin": (lambda x: x.cummin(1)[0], "running_extreme("),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), "logcumsumexp("),
    "per sample": (torch.func.vmap(lambda x: x.cumprod(0)), "cumprod("),
    "a gradient of gradients": (
        lambda x: torch.autograd.grad(x.cumprod(1).sin().sum(), x, create_graph=True)[0],
        "cumprod(",
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_training(name, dtype):
    function, op = CALLS[name]
    module, eager = Model(function, dtype), Model(function, dtype).double()
    options = make_options()
    options.anchorTensor("gradient", "Gradient___weight")
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.0))
    y, _ = model(torch.ones(1, dtype=dtype))
    expected, loss = eager(torch.ones(1).double())
    loss.backward()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(
        y.double(), expected.detach().double(), rtol=tolerance, atol=tolerance
    )
    gradient = model.getAnchoredTensor("gradient").double()
    torch.testing.assert_close(gradient, eager.weight.grad, rtol=tolerance, atol=tolerance)
    assert op in str(model.program())


@pytest.mark.parametrize("kind", ["cumprod", "logcumsumexp"])
def test_an_axis_that_is_not_there(kind):
    with pytest.raises(InternalError, match=rf"{kind}.*the input has an axis 2"):
        one(kind, sample((2, 3)), 2)
