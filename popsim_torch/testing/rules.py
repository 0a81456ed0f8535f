"""The rules of ``assert_trains``: each yields what breaks it, as a sentence for a person."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from popsim_torch.errors import listed_names
from popsim_torch.ir import names
from popsim_torch.tensors import Selection, TensorInfo
from popsim_torch.testing.measuring import TrainingMeasures

__all__ = ["Limits", "broken_rules"]


@dataclass(frozen=True)
class Limits:
    """The limits of the rules, as ``assert_trains`` describes them.

    Attributes:
        loss_falls_by: The share of the loss by which it has to fall; None: it may rise.
        most_update_ratio: The largest ratio of an update to its weight; None: no limit.
        dead_share: The share of zeros from which on a ReLU is dead; None: no limit.
        frozen: The parameters that need no gradient; None: all others are trained.
    """

    loss_falls_by: float | None
    most_update_ratio: float | None
    dead_share: float | None
    frozen: Selection | None


def broken_rules(
    measures: TrainingMeasures, parameters: Mapping[str, torch.nn.Parameter], limits: Limits
) -> list[str]:
    """Return a text for each broken rule and tensor.

    Args:
        measures: What was measured.
        parameters: All parameters of the model, by name.
        limits: The limits.
    """
    if measures.not_finite:  # the other rules need numbers
        return [*_exploding(measures, limits), _not_finite(measures)]
    return [
        *_without_gradient(measures, parameters, limits),
        *_dead(measures, limits),
        *_exploding(measures, limits),
        *_loss(measures, limits),
    ]


def _not_finite(measures: TrainingMeasures) -> str:
    first, *others = measures.not_finite
    found = [f"{n} {what}" for n, what in ((first.nans, "NaN"), (first.infs, "infinite")) if n]
    also = f" So have {listed_names(one.name for one in others)}." if others else ""
    return (
        f"{first.name}: it has {' and '.join(found)} of {first.count:,} values in step "
        f"{first.step}; all have to be finite.{also} Try a smaller learning rate, or find the "
        "first bad op with options.watch()."
    )


def _loss(measures: TrainingMeasures, limits: Limits) -> Iterator[str]:
    if limits.loss_falls_by is None:
        return
    count = max(1, measures.num_steps // 4)
    first = sum(measures.losses[:count]) / count
    last = sum(measures.losses[-count:]) / count
    needed = limits.loss_falls_by * abs(first)
    if first - last > needed:
        return
    change = f"falls by {first - last:.4g}" if last < first else f"rises by {last - first:.4g}"
    than = f"more than {needed:.4g} ({limits.loss_falls_by:.0%})" if needed else "more than 0"
    yield (
        f"loss: it {change}, from {first:.4g} (mean of the first {count} steps) to {last:.4g} "
        f"(last {count}), and has to fall by {than}. Look at the other broken rules first, then "
        "try another learning rate or more steps."
    )


def _without_gradient(
    measures: TrainingMeasures, parameters: Mapping[str, torch.nn.Parameter], limits: Limits
) -> Iterator[str]:
    for name, parameter in parameters.items():
        if _is_frozen(name, parameter, limits.frozen):
            continue
        steps = f"in all {measures.num_steps} steps"
        gradient = measures.gradients.get(names.gradient(name))
        if not parameter.requires_grad:
            yield (
                f"{name}: requires_grad is False, so it is never trained. Call "
                f"requires_grad_(True), or pass frozen={name!r} if that is meant."
            )
        elif gradient is None:
            yield (
                f"{name}: it has no gradient, because the loss does not depend on it. Is the layer "
                "used in forward, and is there a detach() or no_grad() after it?"
            )
        elif gradient == 0.0:
            half = parameter.dtype == torch.float16
            yield (
                f"{name}: its gradient is 0 everywhere {steps}; one value has to differ. Is a "
                "weight after it 0 (initialisation), or a ReLU after it dead"
                f"{', or is the loss scale too small for float16' if half else ''}?"
            )
        elif measures.changes.get(name, 0.0) == 0.0:
            yield (
                f"{name}: it does not change {steps}, although its gradient is as large as "
                f"{gradient:.3g}. Does the optimizer have it, and is its learning rate above 0?"
            )


def _is_frozen(name: str, parameter: torch.nn.Parameter, frozen: Selection | None) -> bool:
    shape, module = tuple(parameter.shape), name.rpartition(".")[0]
    info = TensorInfo(name, shape, parameter.dtype, "weight", "setup", module)
    return frozen is not None and frozen.takes(info)


def _dead(measures: TrainingMeasures, limits: Limits) -> Iterator[str]:
    if limits.dead_share is None:
        return
    for name, share in measures.zero_shares.items():
        if share >= limits.dead_share:
            yield (
                f"{name}: at least {share:.1%} of its values are 0 in every step; below "
                f"{limits.dead_share:.1%} are allowed. Try another initialisation of the layer "
                "before it (its bias), a smaller learning rate, or a LeakyReLU."
            )


def _exploding(measures: TrainingMeasures, limits: Limits) -> Iterator[str]:
    if limits.most_update_ratio is None:
        return
    for name, (ratio, step) in measures.update_ratios.items():
        if ratio > limits.most_update_ratio:
            yield (
                f"{name}: the norm of its update is {ratio:.3g} of its own norm in step {step}; "
                f"at most {limits.most_update_ratio:.3g} are allowed. Try a smaller learning rate, "
                "or max_grad_norm of the optimizer."
            )
