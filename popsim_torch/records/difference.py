"""The result of comparing two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from popsim_torch.dtypes import dtype_name
from popsim_torch.records.tensors import RecordedTensor
from popsim_torch.statistics import Statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Difference", "FirstDifference", "SampleDifference", "StepDifference"]

_SCALARS = (
    *("count", "nans", "infs", "mean", "std", "minimum", "maximum", "norm", "absolute_mean"),
    *("zeros", "subnormals", "half_overflows", "half_underflows", "fingerprint"),
)


@dataclass(frozen=True)
class SampleDifference:
    """The two samples of a tensor that differ most.

    Attributes:
        ulp: How far apart they are: steps from one number of the dtype to the next.
        dtype: The dtype with fewer digits of the two runs.
        index: The index among the samples.
        a: The sample of run a.
        b: The sample of run b.
    """

    ulp: int
    dtype: torch.dtype
    index: int
    a: float
    b: float


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor that differs, in the order of the program.

    Attributes:
        step: The device iteration, counted from 0.
        micro_batch: The micro-batch, counted from 0; None for a tensor of the update, and for
            statistics over all micro-batches.
        replica: The replica, counted from 0.
        tensor: What run a says of the tensor.
        other: What run b says of it; its name differs if PyTorch ran one of the models.
        a: Its statistics in run a.
        b: Its statistics in run b.
        reason: What differs.
        samples: The samples that differ most; None if there are none, or the dtype is unknown.
    """

    step: int
    micro_batch: int | None
    replica: int
    tensor: RecordedTensor
    other: RecordedTensor
    a: Statistics
    b: Statistics
    reason: str
    samples: SampleDifference | None = None

    @property
    def name(self) -> str:
        """The name of the tensor in run a."""
        return self.tensor.name

    @property
    def module(self) -> str:
        """The module that it belongs to; empty for the model itself, or if it is unknown."""
        return self.tensor.module or self.other.module

    @property
    def source(self) -> str:
        """The line of code, ``file:line``; empty if it is unknown."""
        return self.tensor.source or self.other.source


@dataclass(frozen=True)
class StepDifference:
    """How two runs differ in one step.

    Attributes:
        step: The device iteration, counted from 0.
        compared: The number of tensors that were compared.
        differing: The number of those that differ, in any micro-batch or replica.
        largest: The largest relative difference of a norm; infinite if one run has NaN or
            infinities where the other one has none.
        name: The tensor with the largest one; empty if ``largest`` is 0.
    """

    step: int
    compared: int
    differing: int
    largest: float
    name: str


@dataclass(frozen=True, repr=False)
class Difference:
    """Where two runs differ; ``print`` shows it as a report.

    Attributes:
        a: The path of run a.
        b: The path of run b.
        first: The first difference; None if there is none.
        differing_first: The names of all tensors that differ in the step of the first difference.
        growth: The difference in each step that both runs have, in order.
        compared: The number of pairs of records that were compared.
        by_value: The number of those that fingerprints did not decide, but a tolerance.
        only_in_a: The names of the tensors with records in run a alone.
        only_in_b: The same for run b.
        steps_only_in_a: The number of steps that run a alone has.
        steps_only_in_b: The same for run b.
        missing: What was not compared, although the runs may differ there: for example, no weight
            of a has a counterpart in b. Empty if enough was compared to call the runs equal.
        notes: What else to know: which tolerance was used and why, records that have no
            counterpart.
    """

    a: str
    b: str
    first: FirstDifference | None
    differing_first: tuple[str, ...]
    growth: tuple[StepDifference, ...]
    compared: int
    by_value: int
    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    steps_only_in_a: int
    steps_only_in_b: int
    missing: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether enough was compared, and nothing of it differs.

        Records that only one run has do not count. But the runs are not equal if only inputs were
        compared, or if the weights of both have names that nobody can pair: ``missing`` says so.
        """
        return self.first is None and self.compared > 0 and not self.missing

    def __repr__(self) -> str:
        if self.first is None:
            found = f"{'too little' if self.compared else 'nothing'} compared"
            found = "equal" if self.equal else found
        else:
            steps = sum(1 for one in self.growth if one.differing)
            found = f"first at step {self.first.step}, {self.first.name!r}; in {steps} steps"
        return f"Difference({self.a!r}, {self.b!r}: {found})"

    def __str__(self) -> str:
        from popsim_torch.records.report import report

        return report(self)

    def plot(self, path: Any = None) -> Figure:
        """Draw how the difference grows: tensors that differ, and the largest one, by step.

        Args:
            path: The file to save the picture to, such as ``"growth.png"``; None for no file.

        Returns:
            The picture, a ``matplotlib.figure.Figure``; notebooks show it.

        Raises:
            Error: matplotlib is not installed.
        """
        from popsim_torch.records.plot import plot_growth

        return plot_growth(self, path)

    def as_dict(self) -> dict[str, Any]:
        """Return the difference as values that JSON has.

        Numbers that are not finite are the texts ``nan``, ``inf`` and ``-inf``.
        """
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        found["equal"] = self.equal
        found["first"] = None if self.first is None else _first(self.first)
        found["growth"] = [
            {**vars(one), "largest": _json_number(one.largest)} for one in self.growth
        ]
        return {key: list(one) if isinstance(one, tuple) else one for key, one in found.items()}


def _first(first: FirstDifference) -> dict[str, Any]:
    samples = first.samples
    return {
        "step": first.step,
        "micro_batch": first.micro_batch,
        "replica": first.replica,
        "name": first.name,
        "other_name": first.other.name,
        "module": first.module,
        "source": first.source,
        "reason": first.reason,
        "a": _statistics(first.a),
        "b": _statistics(first.b),
        "samples": samples
        and {
            **vars(samples),
            "dtype": dtype_name(samples.dtype),
            "a": _json_number(samples.a),
            "b": _json_number(samples.b),
        },
    }


def _statistics(one: Statistics) -> dict[str, Any]:
    return {name: _json_number(getattr(one, name)) for name in _SCALARS}


def _json_number(number: float | None) -> float | str | None:
    return number if number is None or math.isfinite(number) else str(number)
