"""The ops softmax and softmax_grad, run on the device, against float64 PyTorch."""

import pytest
import torch

from tests.ops.one_op import LAYOUTS, dtype_name, run_op

TOLERANCES = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [
    ((32, 10), 1),
    ((301, 130), 1),
    ((5, 1), 1),
    ((1, 3000), 1),
    ((7,), 0),
    ((33, 70), 0),
    ((3, 19, 5, 29), 1),
    ((2, 3, 4, 5), 2),
]


def sample(shape, dtype, seed):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def softmax(x, axis, log):
    attributes = {"axis": axis, "log": log, "dtype": dtype_name(x.dtype)}
    return run_op("softmax", [x], [(x.dtype, x.shape)], **attributes)[0]


def eager(log):
    return torch.log_softmax if log else torch.softmax


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
@pytest.mark.parametrize(("shape", "axis"), SHAPES, ids=str)
def test_against_float64(shape, axis, dtype, layout, log):
    x = layout(sample(shape, dtype, 1))
    tolerance = TOLERANCES[dtype]
    expected = eager(log)(x.double(), axis)
    y = softmax(x, axis, log)
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)

    gradient = layout(sample(shape, dtype, 2))
    result = layout(expected.to(dtype))
    backward = (
        torch.ops.aten._log_softmax_backward_data
        if log
        else (torch.ops.aten._softmax_backward_data)
    )
    expected_gradient = backward(gradient.double(), result.double(), axis, torch.float64)
    (for_x,) = run_op(
        "softmax_grad",
        [gradient, result],
        [(dtype, shape)],
        axis=axis,
        log=log,
        dtype=dtype_name(dtype),
    )
    bound = 5 * tolerance * max(1.0, expected_gradient.abs().max().item())
    assert (for_x.double() - expected_gradient).abs().max() <= bound


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("axis", [0, 1])
def test_special_values(axis, log):
    infinity, nan = torch.inf, torch.nan
    rows = torch.tensor(
        [
            [0.0, 1.0, -infinity, 2.0, -300.0],
            [-infinity, -infinity, -infinity, -infinity, -infinity],
            [infinity, 0.0, 0.0, 1.0, 2.0],
            [nan, 0.0, 0.0, 1.0, 2.0],
            [0.0, 0.0, 0.0, 1.0, nan],
            [1e30, -1e30, 0.0, 3e38, 3e38],
        ]
    )
    x = rows if axis == 1 else rows.t().contiguous()
    torch.testing.assert_close(softmax(x, axis, log), eager(log)(x, axis), equal_nan=True)


@pytest.mark.parametrize("axis", [0, 1])
def test_safe(axis):
    """Rows of -inf alone become zeros; others are as ever."""
    infinity, nan = torch.inf, torch.nan
    rows = torch.tensor(
        [[-infinity] * 3, [-infinity, 1.0, 2.0], [-infinity, nan, -infinity], [infinity, 0.0, 0.0]]
    ).repeat(1, 9)
    x = rows if axis == 1 else rows.t().contiguous()
    (y,) = run_op(
        "softmax", [x], [(x.dtype, x.shape)], axis=axis, log=False, dtype="float32", safe=True
    )
    torch.testing.assert_close(y, torch.ops.aten._safe_softmax(x, axis), equal_nan=True)


def test_exponentials_are_accurate():
    x = torch.linspace(-87.0, 0.0, 100_000)
    y = softmax(torch.stack([x, torch.zeros_like(x)], 1), 1, log=False)
    expected = x.double().sigmoid()
    error = (y[:, 0].double() - expected).abs() / expected
    assert error.max() < 3e-7
