"""Accumulation of gradients, and weight updates.

Updates of several parameters have the inputs and outputs of one parameter after the other. With
``stream``, float16 values are rounded at random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from popsim_torch.reference.call import Call, op
from popsim_torch.reference.draws import round_at_random

Part = Callable[..., Sequence[Tensor | None]]


def _stored(call: Call, results: Sequence[Tensor | None], first: int = 0) -> list[Tensor | None]:
    """Return results in their stored form: those in float16 rounded at random, if requested."""
    stream = call.get("stream")
    if stream is None:
        return list(results)
    dtypes = call.dtypes[first : first + len(results)]
    return [
        round_at_random(call.run, x, stream + position)
        if x is not None and dtype == torch.float16
        else x
        for position, (x, dtype) in enumerate(zip(results, dtypes, strict=False))
    ]


def _each_part(call: Call, inputs: Sequence[Tensor | None], update: Part) -> list[Tensor | None]:
    """Return the results of an update for each of its parameters."""
    count = call.get("parameters", 1)
    size, num_outputs = len(inputs) // count, len(call.op.outputs) // count
    results: list[Tensor | None] = []
    for part in range(count):
        found = update(call, *inputs[part * size : (part + 1) * size])
        kept = _stored(call, found, part * num_outputs)[:num_outputs]
        results += [*kept, *[None] * (num_outputs - len(kept))]
    return results


def _clip(call: Call, norm: Tensor | None) -> Tensor | float:
    """Return the factor that limits the norm of all gradients."""
    limit: float | None = call.get("max_grad_norm")
    if limit is None or norm is None:
        return 1.0
    factor: Tensor = torch.where(norm <= limit, 1.0, limit / norm)
    return factor


@op
def all_reduce(call: Call, *accumulators: Tensor) -> list[Tensor | None]:
    """Return the sums over all processes: the interpreter is the only one."""
    return list(accumulators)


@op
def accumulate(call: Call, gradient: Tensor, accumulator: Tensor) -> list[Tensor | None]:
    """Return the sum of the gradients of this device iteration so far, or their mean."""
    seen = call.run.position.accumulation_step
    if seen == 0:
        return _stored(call, [gradient])
    if call["running"]:
        return _stored(call, [seen / (seen + 1) * accumulator + gradient / (seen + 1)])
    return _stored(call, [accumulator + gradient])


@op
def gradient_norm(call: Call, *inputs: Tensor) -> Tensor:
    """Return the norm of all gradients together, without the loss scale, averaged."""
    *gradients, loss_scaling = inputs
    squares = torch.stack([g.double().square().sum() for g in gradients])
    scale: Tensor = loss_scaling.double().abs() * call["divisor"]
    return squares.sum().sqrt() / scale


@op
def sgd_update(
    call: Call, w: Tensor, g: Tensor, decay: Tensor, rate: Tensor, norm: Tensor | None = None
) -> list[Tensor | None]:
    """Plain SGD: ``decay * w - rate * g``."""
    return _stored(call, [decay * w - rate * _clip(call, norm) * g])


@op
def sgd_product_update(
    call: Call, w: Tensor, a: Tensor, b: Tensor, decay: Tensor, rate: Tensor
) -> tuple[Tensor, Tensor]:
    """Plain SGD whose gradient is a matrix product."""
    return decay * w - rate * (a @ b), a @ b


def _nesterov(
    call: Call, clip: Tensor | float, w: Tensor, g: Tensor, v: Tensor, scalars: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the true gradient and the step of Nesterov momentum."""
    scale, dampening, momentum, decay = scalars[:4]
    gradient = dampening * clip * g
    return gradient, scale * (gradient + decay * w) + momentum * v


def _sgd_momentum(
    call: Call,
    w: Tensor,
    g: Tensor,
    v: Tensor,
    momentum: Tensor,
    dampening: Tensor,
    decay: Tensor,
    rate: Tensor,
    *rest: Tensor,
) -> list[Tensor | None]:
    clip = _clip(call, rest[-1] if rest else None)
    v = momentum * v + dampening * clip * g + decay * w
    if not call["nesterov"]:
        return [w - rate * v, v]
    gradient, step = _nesterov(call, clip, w, g, v, rest)
    return [w - rate * step, v, gradient, step]


@op
def sgd_momentum_update(call: Call, *inputs: Tensor) -> list[Tensor | None]:
    """SGD with a velocity: ``v = momentum * v + dampening * g + decay * w``, ``w -= rate * v``."""
    return _each_part(call, inputs, _sgd_momentum)


@op
def sgd_combined_accumulate(
    call: Call, gradient: Tensor, velocity: Tensor, dampening: Tensor
) -> list[Tensor | None]:
    """Add a gradient to the velocity that also accumulates."""
    return _stored(call, [velocity + dampening * gradient])


def _sgd_combined(
    call: Call,
    w: Tensor,
    g: Tensor | None,
    v: Tensor,
    momentum: Tensor,
    decay: Tensor,
    rate: Tensor,
    *rest: Tensor,
) -> list[Tensor | None]:
    terms: tuple[Tensor, ...] = ()
    step = v
    if g is not None:
        clip = _clip(call, rest[-1])
        step = v = v + rest[0] * clip * g
        if call["nesterov"]:
            terms = _nesterov(call, clip, w, g, v, rest[1:])
            step = terms[1]
    w = w - rate * step
    return [w, momentum * v + decay * w, v, *terms]


@op
def sgd_combined_update(call: Call, *inputs: Tensor | None) -> list[Tensor | None]:
    """SGD whose velocity is also the accumulator; it is prepared for the next gradients."""
    return _each_part(call, inputs, _sgd_combined)


def _adam_term(
    call: Call, clip: Tensor | float, l2: bool, inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], Tensor, Tensor, Sequence[Tensor]]:
    """Return the new states, the term without decoupled decay, that decay, and other inputs."""
    w, g, m, v, *rest = inputs
    corrected = call["bias_correction"]
    step = rest.pop(0) + 1 if corrected else None
    rate, decay, beta1, beta2, eps, scaling, *others = rest
    g = g / scaling * clip + (decay * w if l2 else 0.0)
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    first, second = m, v
    if step is not None:
        count = step.double().reshape(())
        power1, power2 = beta1.double() ** count, beta2.double() ** count
        first, second = m / (1 - power1).to(m.dtype), v / (1 - power2).to(v.dtype)
    term = first / (second.sqrt() + eps) + (0.0 if l2 else decay * w)
    states: list[Tensor | None] = [m, v] if step is None else [m, v, step]
    return states, term, rate, others


def _adam(call: Call, *inputs: Tensor) -> list[Tensor | None]:
    clip = _clip(call, inputs[-1])
    states, term, rate, _ = _adam_term(call, clip, not call["decoupled_weight_decay"], inputs)
    return [inputs[0] - rate * term, *states, term]


@op
def adam_update(call: Call, *inputs: Tensor) -> list[Tensor | None]:
    """Adam, and AdamW, whose weight decay is not a part of the gradient."""
    return _each_part(call, inputs, _adam)


def _lamb(call: Call, *inputs: Tensor) -> list[Tensor | None]:
    w = inputs[0]
    states, term, rate, (limit,) = _adam_term(call, 1.0, False, inputs)
    sums = w.double().square().sum(), term.double().square().sum()
    weight, length = (total.sqrt().to(w.dtype) for total in sums)
    ratio = torch.minimum(weight, limit) / length
    ratio = torch.where((weight == 0) | (length == 0) | (limit == 0), 1.0, ratio)
    return [w - rate * ratio * term, *states, term, *sums]


@op
def lamb_update(call: Call, *inputs: Tensor) -> list[Tensor | None]:
    """LAMB: AdamW's term, scaled to the norm of the weight."""
    return _each_part(call, inputs, _lamb)


def _rmsprop(call: Call, w: Tensor, g: Tensor, a: Tensor, *rest: Tensor) -> list[Tensor | None]:
    states, scalars = list(rest[:-6]), rest[-6:]
    rate, decay, alpha, momentum, eps, scaling = scalars
    buffer = states.pop(0) if call["momentum"] else None
    mean = states.pop(0) if call["centered"] else None
    g = g / scaling + decay * w
    a = alpha * a + (1 - alpha) * g * g
    mean = None if mean is None else alpha * mean + (1 - alpha) * g
    square = a if mean is None else (a - mean * mean).clamp(min=0)
    if call["tf_variant"]:
        term = g / (square + eps).sqrt()
        step, rate = rate * term, torch.ones_like(rate)
    else:
        step = term = g / (square.sqrt() + eps)
    if buffer is not None:
        step = buffer = momentum * buffer + step
    kept = [x for x in (buffer, mean) if x is not None]
    return [w - rate * step, a, *kept, term]


@op
def rmsprop_update(call: Call, *inputs: Tensor) -> list[Tensor | None]:
    """RMSprop, plain, centred, with momentum, and TensorFlow's."""
    return _each_part(call, inputs, _rmsprop)
