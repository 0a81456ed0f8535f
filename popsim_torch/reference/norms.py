"""Batch, layer and group norm, and their gradients."""

from __future__ import annotations

import math

from torch import Tensor

from popsim_torch.reference.call import Call, op

Maybe = Tensor | None


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """Return one value per channel in a shape that broadcasts over ``[batch, channels, ...]``."""
    return values.reshape(1, -1, *([1] * (like.dim() - 2)))


def _but_channels(x: Tensor) -> list[int]:
    return [axis for axis in range(x.dim()) if axis != 1]


@op
def batch_norm_statistics(
    call: Call,
    x: Tensor,
    weight: Maybe = None,
    running_mean: Maybe = None,
    running_variance: Maybe = None,
) -> list[Maybe]:
    """Return mean, 1 / deviation, that times the weight, and the running statistics."""
    axes, momentum = _but_channels(x), call["momentum"]
    count = x.numel() // x.shape[1]
    # Differences to an approximate mean lose no digits.
    mean = x.double().mean(axes)
    variance = (x.double() - _per_channel(mean, x)).square().mean(axes)
    inverse = (variance + call["epsilon"]).rsqrt()
    running: list[Maybe] = [None, None]
    if running_mean is not None and running_variance is not None:
        unbiased = variance * count / (count - 1.0)
        running = [
            momentum * mean + (1 - momentum) * running_mean,
            momentum * unbiased + (1 - momentum) * running_variance,
        ]
    scale = inverse if weight is None else inverse * weight
    return [mean, inverse, scale, *running]


@op
def batch_norm_grad(
    call: Call, grad_y: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, weight: Maybe = None
) -> list[Tensor]:
    """Return the gradients of weight and bias, and the factors of the input's gradient.

    That gradient is ``of_grad_y * grad_y + of_deviation * (x - mean) + shift``, by channel.
    """
    axes, count = _but_channels(x), x.numel() // x.shape[1]
    sums = grad_y.double().sum(axes)
    products = (grad_y.double() * (x.double() - _per_channel(mean, x))).sum(axes)
    scale = inverse if weight is None else inverse * weight
    of_deviation = -scale * inverse * inverse * products / count
    return [products * inverse, sums, scale, of_deviation, -scale * sums / count]


@op
def layer_norm(
    call: Call, x: Tensor, weight: Maybe = None, bias: Maybe = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the last axes to mean 0 and variance 1; also return the means and 1 / deviation."""
    axes = list(range(-call["axes"], 0))
    mean = x.mean(axes, keepdim=True)
    rstd = ((x - mean).square().mean(axes, keepdim=True) + call["epsilon"]).rsqrt()
    # As in PyTorch, a variance that overflows gives NaN, not the bias.
    rstd = rstd.masked_fill(rstd == 0, math.nan)
    y = (x - mean) * rstd
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, rstd


def _norm_grad(gradient: Tensor, normalised: Tensor, rstd: Tensor, axes: list[int]) -> Tensor:
    """Return the gradient of x from the gradient of the normalised values."""
    mean = gradient.mean(axes, keepdim=True)
    projection = (gradient * normalised).mean(axes, keepdim=True)
    return rstd * (gradient - mean - normalised * projection)


@op
def layer_norm_grad(
    call: Call, gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    count = call["axes"]
    normalised = (x - mean) * rstd
    grad = gradient if weight is None else gradient * weight
    for_x = _norm_grad(grad, normalised, rstd, list(range(-count, 0)))
    rows = list(range(x.dim() - count))
    if not rows:
        return for_x, gradient * normalised, gradient
    return for_x, (gradient * normalised).sum(rows), gradient.sum(rows)


def _grouped(x: Tensor, groups: int) -> Tensor:
    """Return images as ``[batch, groups, elements of a group]``."""
    return x.reshape(x.shape[0], groups, -1)


@op
def group_norm(
    call: Call, x: Tensor, weight: Maybe = None, bias: Maybe = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise groups of channels to mean 0 and variance 1; also return means, 1 / deviation."""
    rows = _grouped(x, call["groups"])
    mean = rows.mean(-1, keepdim=True)
    rstd = ((rows - mean).square().mean(-1, keepdim=True) + call["epsilon"]).rsqrt()
    y = ((rows - mean) * rstd).reshape(x.shape)
    y = y if weight is None else y * _per_channel(weight, x)
    y = y if bias is None else y + _per_channel(bias, x)
    return y, mean.squeeze(-1), rstd.squeeze(-1)


@op
def group_norm_grad(
    call: Call, gradient: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Maybe = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and bias."""
    groups, rstd = call["groups"], rstd.unsqueeze(-1)
    normalised = (_grouped(x, groups) - mean.unsqueeze(-1)) * rstd
    grad = gradient if weight is None else gradient * _per_channel(weight, x)
    for_x = _norm_grad(_grouped(grad, groups), normalised, rstd, [-1]).reshape(x.shape)
    axes = _but_channels(x)
    return for_x, (gradient * normalised.reshape(x.shape)).sum(axes), gradient.sum(axes)
