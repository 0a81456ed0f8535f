"""Convolutions that write their channels last, and those that apply a ReLU."""

import pytest
import torch

from tests.ops.images import convolution_attributes, random, run_image_op, with_channels_last

TOLERANCES = {torch.float32: 1e-5, torch.float16: 6e-4, torch.bfloat16: 5e-3}
# Shapes of x and weight, stride, padding, groups.
CASES = {
    "one_channel": ((3, 1, 14, 14), (8, 1, 3, 3), 1, 0, 1),
    "colours": ((2, 3, 17, 13), (16, 3, 5, 5), 2, 2, 1),
    "blocks": ((2, 32, 14, 14), (64, 32, 3, 3), 1, 1, 1),
    "odd": ((2, 19, 9, 8), (5, 19, 3, 2), 2, 1, 1),
    "pointwise": ((2, 16, 12, 12), (24, 16, 1, 1), 2, 0, 1),
    "few_channels": ((5, 6, 10, 10), (8, 6, 1, 1), 2, 0, 1),
    "groups": ((2, 12, 9, 9), (18, 4, 3, 3), 1, 0, 3),
    "few_points": ((2, 40, 4, 4), (48, 40, 1, 1), 1, 0, 1),
    "few_strided_points": ((3, 20, 5, 5), (30, 20, 1, 1), 2, 0, 1),
    "few_patches": ((2, 9, 3, 3), (160, 9, 3, 3), 1, 1, 1),
    "few_patches_of_many": ((1, 12, 5, 4), (384, 12, 3, 2), 2, 1, 1),
    "depthwise": ((3, 70, 6, 5), (70, 1, 3, 3), 1, 1, 70),
    "depthwise_strided": ((2, 128, 9, 8), (128, 1, 5, 5), 2, 2, 128),
    "depthwise_point": ((4, 33, 1, 1), (33, 1, 3, 3), 1, 1, 33),
    "depthwise_long": ((1, 40, 30, 30), (40, 1, 3, 3), 1, 1, 40),
    "whole_image": ((4, 6, 5, 7), (9, 6, 5, 7), 1, 0, 1),
}


def attributes_of(name: str) -> dict:
    _, _, stride, padding, groups = CASES[name]
    return convolution_attributes([stride], [padding], [1], groups)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = max(1.0, expected.abs().max().item())
    torch.testing.assert_close(
        actual.double(), expected, rtol=0, atol=TOLERANCES[actual.dtype] * scale
    )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("last_in", [False, True], ids=["in_first", "in_last"])
def test_results_with_their_channels_last(last_in, name, dtype):
    x_shape, weight_shape, stride, padding, groups = CASES[name]
    x, weight = random(x_shape, dtype), random(weight_shape, dtype)
    bias = random(weight_shape[:1], dtype)
    leaves = [v.double().requires_grad_() for v in (x, weight)]
    y = torch.nn.functional.conv2d(*leaves, bias.double(), stride, padding, 1, groups)
    grad_y = random(y.shape, dtype)
    expected = torch.autograd.grad(y, leaves, grad_y.double())
    if last_in:
        x, grad_y = with_channels_last(x), with_channels_last(grad_y)
    attributes = attributes_of(name)
    (forward,) = run_image_op(
        "convolution", [x, weight, bias], [(dtype, y.shape)], attributes, channels_last=True
    )
    assert_near(forward, y.detach())
    (grad_x,) = run_image_op(
        "convolution_grad_input",
        [grad_y, weight],
        [(dtype, x_shape)],
        {**attributes, "input_shape": list(x_shape)},
        channels_last=True,
    )
    assert_near(grad_x, expected[0])
    (grad_weight,) = run_image_op(
        "convolution_grad_weight",
        [grad_y, x],
        [(dtype, weight_shape)],
        {**attributes, "weight_shape": list(weight_shape)},
    )
    assert_near(grad_weight, expected[1])
