"""The op cumsum, run on the device, against eager PyTorch: the same order, so the same bits."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from tests.ops.one_op import LAYOUTS, dtype_name, run_op

SHAPES = [
    ((7,), 0),
    ((100_003,), 0),
    ((1, 1), 1),
    ((32, 10), 1),
    ((301, 1300), 1),
    ((301, 1300), 0),
    ((33, 2051), 0),
    ((3, 19, 5, 29), 1),
    ((2, 3, 4, 5), 2),
]
EMPTY = [((4, 0, 3), 1), ((0, 4), 1), ((4, 0), 0)]
HALF_TOLERANCES = {torch.float16: 1e-3, torch.bfloat16: 8e-3}


def sample(shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def cumsum(x, axis):
    return run_op("cumsum", [x], [(x.dtype, x.shape)], axis=axis)[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_the_same_bits(shape, axis, layout):
    x = layout(sample(shape))
    torch.testing.assert_close(cumsum(x, axis), x.cumsum(axis), rtol=0, atol=0)


@pytest.mark.parametrize(("shape", "axis"), EMPTY, ids=str)
def test_no_elements(shape, axis):
    assert cumsum(sample(shape), axis).shape == shape


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", HALF_TOLERANCES, ids=dtype_name)
@pytest.mark.parametrize(("shape", "axis"), [((301, 1300), 1), ((33, 2051), 0)], ids=str)
def test_half_precision(shape, axis, dtype, layout):
    x = layout(sample(shape, dtype))
    y = cumsum(x, axis)
    assert y.dtype == dtype
    tolerance = HALF_TOLERANCES[dtype]
    torch.testing.assert_close(y.double(), x.double().cumsum(axis), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("axis", [0, 1])
def test_special_values(axis):
    infinity = torch.inf
    rows = torch.tensor(
        [
            [1.0, infinity, 2.0, -infinity, 1.0],
            [torch.nan, 0.0, 1.0, 2.0, 3.0],
            [3e38, 3e38, -3e38, -3e38, 1.0],
            [-0.0, -0.0, 1e-45, -1e-45, 0.0],
            [1e8, 1.0, -1e8, 1.0, 1e-8],
        ]
    )
    x = rows if axis == 1 else rows.t().contiguous()
    torch.testing.assert_close(cumsum(x, axis), x.cumsum(axis), rtol=0, atol=0, equal_nan=True)


def test_an_axis_that_is_not_there():
    with pytest.raises(InternalError, match=r"cumsum.*the input has an axis 2"):
        cumsum(sample((2, 3)), 2)


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(sample((6, 5)))

    def forward(self, x):
        y = (x * self.weight).cumsum(-1).tanh().cumsum(0)
        return y, poptorch.identity_loss((y * x).sum(), "none")


def test_training():
    module, x = Sums(), sample((6, 5))
    options = poptorch.Options().showCompilationProgressBar(False)
    options.anchorTensor("gradient", "Gradient___weight")
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))
    y, _ = model(x)

    eager = Sums()
    expected, loss = eager(x)
    loss.backward()
    torch.testing.assert_close(y, expected.detach())
    torch.testing.assert_close(model.getAnchoredTensor("gradient"), eager.weight.grad)
    assert "aten::cumsum" not in model.program()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x > 0).cumsum(0),
        lambda x: x.cumsum(0, dtype=torch.float16),
        lambda x: x.sum().cumsum(0),
    ],
    ids=["integers", "another element type", "no axes"],
)
def test_what_pytorch_computes(function):
    class Module(nn.Module):
        def forward(self, x):
            return function(x)

    options = poptorch.Options().showCompilationProgressBar(False)
    x = sample((6, 5), torch.float16).float()
    torch.testing.assert_close(
        poptorch.inferenceModel(Module(), options)(x), function(x), check_dtype=False
    )
