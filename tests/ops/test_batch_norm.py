"""The two ops of batch norm in training, against float64 eager PyTorch."""

import pytest
import torch

from tests.ops.images import random, run_image_op, with_channels_last

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
SHAPES = [
    (5, 3),
    (300, 200),
    (4, 3, 7),
    (2, 1, 3, 5),
    (3, 16, 8, 8),
    (2, 5, 33, 31),
    (4, 70, 3, 3),
    (9, 64, 1, 1),
    (2, 600, 5, 4),
    (2, 3, 3, 4, 5),
]
EPSILON = 1e-5


def statistics(x: torch.Tensor, weight=None, running=(None, None), momentum=0.1):
    channels = (x.shape[1],)
    outputs = [(torch.float32, channels)] * 3
    outputs += [(torch.float32, channels) if r is not None else None for r in running]
    attributes = {"momentum": momentum, "epsilon": EPSILON}
    return run_image_op("batch_norm_statistics", [x, weight, *running], outputs, attributes)


def axes(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_statistics(last, shape, dtype):
    x = random(shape, dtype) * 2 + 3
    weight = random(shape[1:2], dtype)
    running = (random(shape[1:2], dtype), random(shape[1:2], dtype).abs())
    exact = x.double()
    mean, variance = exact.mean(axes(x)), exact.var(axes(x), correction=0)
    deviation = (variance + EPSILON).rsqrt()
    expected = [
        *(mean, deviation, deviation * weight.double()),
        0.9 * running[0].double() + 0.1 * mean,
        0.9 * running[1].double() + 0.1 * exact.var(axes(x), correction=1),
    ]
    actual = statistics(with_channels_last(x) if last else x, weight, running)
    for ours, wanted in zip(actual[:3], expected[:3], strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=2e-6, atol=2e-6)
    for ours, wanted in zip(actual[3:], expected[3:], strict=True):
        tolerance = TOLERANCES[dtype] * 2
        torch.testing.assert_close(ours.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_a_large_mean_does_not_cancel_the_variance(last):
    x = torch.randn(8, 6, 40, 40) + 1e4
    exact = x.double().var(axes(x), correction=0)
    _, deviation, *_ = statistics(with_channels_last(x) if last else x)
    torch.testing.assert_close(deviation.double(), exact.rsqrt(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
def test_nan_and_infinity_reach_the_statistics_of_their_channel_alone(last):
    x = torch.randn(2, 4, 5, 5)
    x[0, 1, 2, 2], x[1, 2, 3, 3] = torch.nan, torch.inf
    mean, deviation, *_ = statistics(with_channels_last(x) if last else x)
    assert mean[1].isnan() and deviation[1].isnan()
    assert deviation[2].isnan()
    assert mean[[0, 3]].isfinite().all() and deviation[[0, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("affine", [False, True], ids=["plain", "affine"])
def test_gradient(affine, last, shape, dtype):
    x, grad_y = random(shape, dtype) + 1, random(shape, dtype)
    weight = random(shape[1:2], dtype) if affine else None
    leaf = x.double().requires_grad_()
    mean, variance = leaf.mean(axes(x)), leaf.var(axes(x), correction=0)
    normal = (leaf - per_channel(mean, x)) * per_channel((variance + EPSILON).rsqrt(), x)
    y = normal if weight is None else normal * per_channel(weight.double(), x)
    (expected,) = torch.autograd.grad(y, leaf, grad_y.double())
    given = [with_channels_last(grad_y), with_channels_last(x)] if last else [grad_y, x]
    saved_mean = mean.detach().float()
    deviation = (variance.detach() + EPSILON).rsqrt().float()
    outputs = [(dtype, shape[1:2])] * 2 + [(torch.float32, shape[1:2])] * 3
    for_weight, for_bias, of_grad_y, of_deviation, shift = run_image_op(
        "batch_norm_grad", [*given, saved_mean, deviation, weight], outputs, {}
    )
    exact = grad_y.double()
    scale = exact.abs().sum(axes(x)).max().item()
    for ours, wanted in (
        (for_weight, (exact * normal.detach()).sum(axes(x))),
        (for_bias, exact.sum(axes(x))),
    ):
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=TOLERANCES[dtype] * scale)
    centred = x.float() - per_channel(saved_mean, x)
    grad_x = grad_y.float() * per_channel(of_grad_y, x) + centred * per_channel(of_deviation, x)
    grad_x = (grad_x + per_channel(shift, x)).double()
    largest = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(grad_x, expected, rtol=0, atol=1e-5 * largest)
