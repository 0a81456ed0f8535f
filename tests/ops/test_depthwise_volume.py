"""Depthwise convolutions of volumes, whose results have their channels last."""

import pytest
import torch
from torch.nn.functional import conv3d

import popsim_torch as poptorch
from tests.ops.images import convolution_attributes, random, run_image_op, with_channels_last

TOLERANCES = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
# Shapes of x and of each kernel, stride, padding, dilation.
CASES = {
    "plain": ((2, 96, 4, 7, 6), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "odd_channels": ((3, 117, 3, 4, 5), (2, 3, 2), (1, 1, 1), (0, 1, 0), (1, 1, 1)),
    "few_channels": ((2, 3, 5, 6, 9), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "strides": ((2, 40, 5, 11, 9), (3, 3, 3), (1, 4, 2), (1, 1, 1), (1, 1, 1)),
    "unused_border": ((1, 20, 6, 7, 8), (1, 2, 3), (4, 4, 5), (0, 0, 0), (1, 1, 1)),
    "dilation": ((2, 16, 6, 9, 8), (2, 3, 3), (1, 2, 1), (1, 2, 3), (3, 2, 2)),
    "wide_padding": ((1, 17, 2, 2, 2), (3, 3, 3), (1, 1, 1), (4, 4, 4), (1, 1, 1)),
    "point": ((4, 33, 1, 1, 1), (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)),
    "large": ((2, 32, 8, 24, 20), (3, 5, 5), (1, 1, 1), (1, 2, 2), (1, 1, 1)),
}


def passes_of(x, weight, bias, grad_y, attributes):
    """Return y and the gradients of x and weight, as the ops compute them."""
    dtype = x.dtype
    (y,) = run_image_op(
        "convolution",
        [x, weight, bias],
        [(dtype, grad_y.shape)],
        attributes,
        channels_last=True,
    )
    (grad_x,) = run_image_op(
        "convolution_grad_input",
        [grad_y, weight],
        [(dtype, x.shape)],
        {**attributes, "input_shape": list(x.shape)},
        channels_last=True,
    )
    (grad_weight,) = run_image_op(
        "convolution_grad_weight",
        [grad_y, x],
        [(dtype, weight.shape)],
        {**attributes, "weight_shape": list(weight.shape)},
    )
    return y, grad_x, grad_weight


def problem_of(name, dtype):
    """Return x, weight and bias, the attributes, and eager PyTorch's convolution."""
    x_shape, kernel, stride, padding, dilation = CASES[name]
    channels = x_shape[1]
    x, weight = random(x_shape, dtype), random((channels, 1, *kernel), dtype)
    attributes = convolution_attributes(stride, padding, dilation, channels)
    return (
        (x, weight, random((channels,), dtype)),
        attributes,
        (stride, padding, dilation, channels),
    )


@pytest.mark.parametrize("last_in", [False, True], ids=["in_first", "in_last"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_all_passes_agree_with_float64(name, dtype, last_in):
    (x, weight, bias), attributes, geometry = problem_of(name, dtype)
    leaves = [v.double().requires_grad_() for v in (x, weight)]
    y = conv3d(*leaves, bias.double(), *geometry)
    grad_y = random(y.shape, dtype)
    expected = [y.detach(), *torch.autograd.grad(y, leaves, grad_y.double())]
    sizes = [v.double().abs().requires_grad_() for v in (x, weight)]
    terms = conv3d(*sizes, bias.double().abs(), *geometry)
    limits = [terms.detach(), *torch.autograd.grad(terms, sizes, grad_y.double().abs())]
    if last_in:
        x, grad_y = with_channels_last(x), with_channels_last(grad_y)
    actual = passes_of(x, weight, bias, grad_y, attributes)
    for one, other, limit in zip(actual, expected, limits, strict=True):
        assert one.dtype == dtype
        error = (one.double() - other).abs()
        # Relative to the sum of the absolute products; a 16-bit result may be denormal.
        assert (error <= TOLERANCES[dtype] * limit + 1e-7).all()


def test_bad_numbers_stay_with_their_channel_and_neighbours():
    (x, weight, bias), attributes, geometry = problem_of("plain", torch.float32)
    x[1, 70, 2, 3, 3], x[0, 5, 0, 0, 0] = float("nan"), float("inf")
    y = conv3d(x.double(), weight.double(), bias.double(), *geometry).float()
    operands = with_channels_last(x), weight, bias, torch.ones_like(y)
    actual = passes_of(*operands, attributes)[0]
    assert (y.isnan().sum(), y.isinf().sum()) == (27, 8)
    assert torch.equal(actual.isnan(), y.isnan())
    assert torch.equal(actual.isinf(), y.isinf())


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_only_depthwise_volumes_have_their_channels_last(groups):
    model = torch.nn.Conv3d(6, 6, 3, padding=1, groups=groups)
    compiled = poptorch.inferenceModel(model)
    x = torch.randn(2, 6, 4, 5, 6)
    torch.testing.assert_close(compiled(x), model(x).detach())
    graph = compiled.compiled.program.graph
    (op,) = (op for op in graph.ops if op.kind == "convolution")
    out = graph.tensors[op.outputs[0]]
    assert out.shape == (2, 6, 4, 5, 6)
    assert out.is_contiguous == (groups != 6)


class Tokens(torch.nn.Module):
    """Video transformers pool tokens so; then batch norm, which wants channels first."""

    def __init__(self):
        super().__init__()
        self.pool = torch.nn.Conv3d(24, 24, 3, (1, 2, 2), 1, groups=24, bias=False)
        self.norm = torch.nn.BatchNorm3d(24)
        self.after = torch.nn.Conv3d(24, 24, (3, 1, 1), padding=(1, 0, 0), groups=24)

    def forward(self, tokens, target):
        volume = tokens.reshape(2, 4, 6, 6, 24).permute(0, 4, 1, 2, 3)
        pooled = self.after(torch.relu(self.norm(self.pool(volume))) + 1)
        rows = pooled.flatten(2).transpose(1, 2)
        return rows, torch.nn.functional.mse_loss(rows, target)


def test_a_model_trains_as_in_eager_pytorch():
    torch.manual_seed(0)
    model, eager = Tokens(), Tokens()
    eager.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    training = poptorch.trainingModel(
        model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1)
    )
    for _ in range(3):
        tokens, target = torch.randn(2, 144, 24), torch.randn(2, 36, 24)
        rows, loss = training(tokens, target)
        optimizer.zero_grad()
        expected_rows, expected = eager(tokens, target)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(rows, expected_rows.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loss, expected.detach())
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, eager.get_parameter(name), rtol=1e-4, atol=1e-5)
