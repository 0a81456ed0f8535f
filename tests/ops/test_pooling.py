"""Pooling and its gradients, against eager PyTorch."""

import pytest
import torch
from torch.nn import functional as F

from tests.ops.images import random, run_image_op, with_channels_last
from tests.ops.one_op import dtype_name

DTYPES = [torch.float32, torch.float16]
# Shape of x; kernel, stride, padding, dilation, ceil_mode.
MAX_CASES = {
    "disjoint": ((2, 16, 8, 8), 2, 2, 0, 1, False),
    "rest": ((2, 5, 9, 7), 2, 2, 0, 1, False),
    "overlapping": ((2, 20, 9, 11), 3, 2, 1, 1, False),
    "dilated": ((2, 3, 12, 10), 3, 1, 1, 2, False),
    "ceil": ((1, 18, 10, 9), (3, 2), (2, 3), (1, 0), 1, True),
    "gaps": ((2, 4, 11, 11), 2, 3, 0, 1, False),
    "one_channel": ((2, 1, 6, 6), 2, 2, 0, 1, False),
    "whole": ((3, 7, 4, 5), (4, 5), 1, 0, 1, False),
    "threads": ((16, 32, 32, 32), 2, 2, 0, 1, False),
}


def pair(value) -> list[int]:
    return list(value) if isinstance(value, tuple) else [value, value]


def max_attributes(name: str) -> dict:
    _, kernel, stride, padding, dilation, ceil_mode = MAX_CASES[name]
    names = ("kernel", "stride", "padding", "dilation")
    values = map(pair, (kernel, stride, padding, dilation))
    return {**dict(zip(names, values, strict=True)), "ceil": ceil_mode}


def run_max(name: str, x: torch.Tensor, *, last: bool, index=torch.int64):
    _, kernel, stride, padding, dilation, ceil_mode = MAX_CASES[name]
    # PyTorch computes it in float32: float16 is not supported everywhere.
    y, indices = F.max_pool2d(
        x.float(), kernel, stride, padding, dilation, ceil_mode, return_indices=True
    )
    actual = run_image_op(
        "max_pool",
        [with_channels_last(x) if last else x],
        [(x.dtype, y.shape), (index, y.shape)],
        {**max_attributes(name), "indices": dtype_name(index)},
        channels_last=last,
    )
    return actual, (y.to(x.dtype), indices)


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAX_CASES)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_max_pool(last, name, dtype, index):
    (y, indices), expected = run_max(
        name, random(MAX_CASES[name][0], dtype), last=last, index=index
    )
    assert_same(y, expected[0])
    assert_same(indices.long(), expected[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["disjoint", "overlapping", "dilated"])
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_max_pool_of_special_values_and_ties(last, name, value):
    x = torch.randint(0, 3, MAX_CASES[name][0]).float()
    x[torch.rand(x.shape) < 0.3] = value
    (y, indices), expected = run_max(name, x, last=last)
    assert_same(y, expected[0])
    assert_same(indices, expected[1])


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAX_CASES)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("last_grad", [False, True], ids=["grad_first", "grad_last"])
def test_gradient_of_max_pool(last_grad, last, name, dtype, index):
    shape, kernel, stride, padding, dilation, ceil_mode = MAX_CASES[name]
    x = random(shape, torch.float32).requires_grad_()
    y, indices = F.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode, return_indices=True)
    grad_y = random(y.shape, dtype)
    (expected,) = torch.autograd.grad(y, x, grad_y.float())
    indices = indices.to(index)
    (actual,) = run_image_op(
        "max_pool_grad",
        [
            with_channels_last(grad_y) if last_grad and last else grad_y,
            with_channels_last(indices) if last else indices,
        ],
        [(dtype, shape)],
        {**max_attributes(name), "input_shape": list(shape)},
        channels_last=last,
    )
    assert_same(actual, expected.to(dtype))


# Shape of x; arguments of avg_pool2d, or the size that an adaptive pool gives.
AVERAGE_CASES = {
    "disjoint": ((2, 16, 8, 8), (2, 2, 0, False, True, None)),
    "padded": ((2, 5, 9, 7), (3, 2, 1, False, True, None)),
    "without_padding": ((2, 20, 9, 7), (3, 2, 1, True, False, None)),
    "ceil": ((1, 18, 10, 9), ((3, 2), (2, 3), (1, 0), True, True, None)),
    "divisor": ((2, 3, 6, 6), (2, 2, 0, False, True, 3)),
    "adaptive": ((2, 16, 10, 7), (3, 4)),
    "adaptive_up": ((2, 3, 3, 4), (5, 6)),
    "adaptive_one": ((3, 8, 6, 5), (1, 1)),
}


def average(name: str, x: torch.Tensor) -> torch.Tensor:
    arguments = AVERAGE_CASES[name][1]
    if len(arguments) == 2:
        return torch.ops.aten._adaptive_avg_pool2d(x, arguments)
    return F.avg_pool2d(x, *arguments)


def average_attributes(name: str, y: torch.Tensor) -> dict:
    arguments = AVERAGE_CASES[name][1]
    if len(arguments) == 2:
        return {"output_size": list(y.shape[2:])}
    kernel, stride, padding, ceil_mode, include_padding, divisor = arguments
    return {
        "kernel": pair(kernel),
        "stride": pair(stride),
        "padding": pair(padding),
        "dilation": [1, 1],
        "ceil": ceil_mode,
        "count_include_pad": include_padding,
        "divisor": divisor or 0,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", AVERAGE_CASES)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_average_pool_and_its_gradient(last, name, dtype):
    shape = AVERAGE_CASES[name][0]
    x = random(shape, dtype)
    leaf = x.double().requires_grad_()
    y = average(name, leaf)
    grad_y = random(y.shape, dtype)
    (expected,) = torch.autograd.grad(y, leaf, grad_y.double())
    attributes = average_attributes(name, y)
    if last:
        x, grad_y = with_channels_last(x), with_channels_last(grad_y)
    (actual,) = run_image_op(
        "average_pool", [x], [(dtype, y.shape)], attributes, channels_last=last
    )
    tolerance = {torch.float32: 1e-6, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(actual.double(), y.detach(), rtol=tolerance, atol=tolerance)
    (actual,) = run_image_op(
        "average_pool_grad",
        [grad_y],
        [(dtype, shape)],
        {**attributes, "input_shape": list(shape)},
        channels_last=last,
    )
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
