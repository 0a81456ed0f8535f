"""Trains a model for some steps, and measures what the rules of ``assert_trains`` ask."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from popsim_torch import tensors
from popsim_torch.enums import OutputMode
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.ir import names
from popsim_torch.model import PoplarExecutor
from popsim_torch.options import Options
from popsim_torch.private_torch.trees import tree_leaves

__all__ = ["NotFinite", "TrainingMeasures", "anchored_options", "measure"]

_RELU = tensors.activations() & re.compile(r"(^|/)Relu:\d+(/\d+)?$")
# One pattern that always matches something: a model without a ReLU is no reason for a warning.
_MEASURED = tensors.Glob("*") & (
    tensors.gradients() | tensors.weights() | tensors.updates() | _RELU
)
_ANCHOR = "assert_trains"


@dataclass(frozen=True)
class NotFinite:
    """A tensor with NaN or infinite values.

    Attributes:
        step: The step, counted from 0.
        name: The name of the tensor; ``loss`` for the loss.
        nans: The number of NaN.
        infs: The number of infinite values.
        count: The number of all values.
    """

    step: int
    name: str
    nans: int
    infs: int
    count: int


@dataclass
class TrainingMeasures:
    """What ``assert_trains`` has measured.

    Attributes:
        losses: The loss of each step; the mean if a step has several micro-batches.
        gradients: For each parameter with a gradient the largest magnitude in all steps.
        changes: For each trained parameter the largest magnitude of a change in one step.
        update_ratios: For each parameter with two or more dimensions the largest norm of an update
            divided by the norm of the parameter, and the step of it.
        zero_shares: For each result of a ReLU the share of zeros in the step that has fewest.
        not_finite: The tensors with NaN or infinite values, in the first step that has any.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, float] = field(default_factory=dict)
    changes: dict[str, float] = field(default_factory=dict)
    update_ratios: dict[str, tuple[float, int]] = field(default_factory=dict)
    zero_shares: dict[str, float] = field(default_factory=dict)
    not_finite: list[NotFinite] = field(default_factory=list)

    @property
    def num_steps(self) -> int:
        """The number of steps that have run: measuring ends at a value that is not finite."""
        return len(self.losses)


def anchored_options(options: Options | None) -> Options:
    """Return options that also record what is measured.

    Args:
        options: The options of the user; None for the defaults.
    """
    own = Options() if options is None else options.clone()
    own.outputMode(OutputMode.All)
    return own.anchorTensor(_ANCHOR, _MEASURED, OutputMode.All)


def measure(
    executor: PoplarExecutor[..., Any], batches: Iterable[Any], steps: int, *, wrapped: bool
) -> TrainingMeasures:
    """Train, and measure.

    Args:
        executor: A training executor with ``anchored_options``.
        batches: The batches, each with the arguments of a call; they are repeated if there are
            too few.
        steps: The number of steps.
        wrapped: Whether the user's model is the part ``model`` of the executor's.

    Raises:
        UsageTypeError: ``batches`` cannot be iterated over.
        UsageValueError: There are no batches, or the model does not return its loss.
    """
    measures, recorded = TrainingMeasures(), _Recorded(executor, wrapped=wrapped)
    for step, batch in enumerate(itertools.islice(_repeated(batches), steps)):
        result = executor(*batch) if isinstance(batch, (tuple, list)) else executor(batch)
        _add_loss(measures, step, _loss(executor, result))
        entries = recorded.read()
        _add_gradients(measures, step, entries["gradient"])
        if measures.not_finite:
            break
        _add_updates(measures, step, entries["weight"], entries["updated weight"])
        _add_zero_shares(measures, entries["activation"])
    if not measures.losses:
        raise UsageValueError("assert_trains: the data has no batches. Pass at least one.")
    return measures


def _repeated(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches, and then again those that have come so far."""
    if isinstance(batches, torch.Tensor) or not isinstance(batches, Iterable):
        raise UsageTypeError(
            f"assert_trains: the data is a {type(batches).__name__}. Pass a list of batches or a "
            "DataLoader; each batch is the arguments of a call, [(x, y), ...]."
        )
    seen = []
    for batch in batches:
        seen.append(batch)
        yield batch
    yield from itertools.cycle(seen)


class _Recorded:
    """Reads what a call has recorded.

    Args:
        executor: The executor.
        wrapped: As in ``measure``.
    """

    def __init__(self, executor: PoplarExecutor[..., Any], *, wrapped: bool) -> None:
        self._executor = executor
        self._wrapped = wrapped

    def read(self) -> dict[str, dict[str, torch.Tensor]]:
        """Return the tensors by kind and name; the first axis is for micro-batches of the call."""
        found: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for name, value in self._executor.getAnchoredTensor(_ANCHOR).items():
            info = self._infos[name]
            shown = names.inside(name) if self._wrapped else name
            if value.numel():
                found[info.kind][shown] = value.reshape(-1, *(info.shape or ()))
        return found

    @cached_property
    def _infos(self) -> dict[str, tensors.TensorInfo]:
        """What is known about the tensors, by name, once the executor is compiled."""
        return {one.name: one for one in self._executor.names()}


def _loss(executor: PoplarExecutor[..., Any], result: Any) -> torch.Tensor:
    """Return the loss of each micro-batch: the last result with one number for each."""
    loop = executor.compiled.run.loop
    count = loop.device_iterations * loop.gradient_accumulation * loop.replicas
    for leaf in reversed(tree_leaves(result)):
        if isinstance(leaf, torch.Tensor) and leaf.numel() == count and leaf.dim() <= 1:
            return leaf
    raise UsageValueError(
        "assert_trains: forward returns no scalar, so the loss is unknown. Return the loss, "
        "alone or last, or pass loss=, a function of the model's result and the labels."
    )


def _add_loss(measures: TrainingMeasures, step: int, loss: torch.Tensor) -> None:
    _note_not_finite(measures, step, "loss", loss)
    measures.losses.append(loss.double().mean().item())


def _note_not_finite(measures: TrainingMeasures, step: int, name: str, value: torch.Tensor) -> None:
    nans, infs = int(value.isnan().sum()), int(value.isinf().sum())
    if nans or infs:
        measures.not_finite.append(NotFinite(step, name, nans, infs, value.numel()))


def _add_gradients(
    measures: TrainingMeasures, step: int, gradients: dict[str, torch.Tensor]
) -> None:
    for name, value in gradients.items():
        _note_not_finite(measures, step, name, value)
        largest = value.double().abs().nan_to_num().amax().item()
        measures.gradients[name] = max(measures.gradients.get(name, 0.0), largest)


def _add_updates(
    measures: TrainingMeasures,
    step: int,
    weights: dict[str, torch.Tensor],
    updates: dict[str, torch.Tensor],
) -> None:
    for name, updated in updates.items():
        parameter = names.updated_parameter(name)
        before = weights[parameter].double()
        change = updated.double() - before
        largest = change.abs().nan_to_num().amax().item()
        measures.changes[parameter] = max(measures.changes.get(parameter, 0.0), largest)
        ratio = _largest_ratio(change, before)
        if ratio > measures.update_ratios.get(parameter, (0.0, 0))[0]:
            measures.update_ratios[parameter] = (ratio, step)


def _largest_ratio(change: torch.Tensor, before: torch.Tensor) -> float:
    """Return the largest ratio of the norms of two tensors in a micro-batch, the first axis.

    It is 0.0 for parameters with fewer than two dimensions, and where the second tensor is 0.
    """
    if before.dim() < 3:
        return 0.0
    norms = before.flatten(1).norm(dim=1)
    ratios = (change.flatten(1).norm(dim=1) / norms)[norms > 0]
    return max(ratios.nan_to_num(math.inf).tolist(), default=0.0)


def _add_zero_shares(measures: TrainingMeasures, relus: dict[str, torch.Tensor]) -> None:
    for name, value in relus.items():
        share = (value == 0).double().mean().item()
        measures.zero_shares[name] = min(measures.zero_shares.get(name, 1.0), share)
