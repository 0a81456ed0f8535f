"""Statistics of captured tensors, and the tables that show them.

``summarise`` computes numbers; the ``*_table`` functions format them as text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.tables import table, terminal_width

__all__ = [
    "TensorSummary",
    "epoch_title",
    "extended_table",
    "finite_lines",
    "named_leaves",
    "step_norms",
    "step_title",
    "summarise",
    "summary_table",
]

# A block of this size stays in the caches when it is converted to float64.
_CHUNK = 1 << 16
_QUANTILES = (0.01, 0.5, 0.99)
# Six decimals cannot show smaller numbers.
_SMALL = 5e-7


@dataclass(frozen=True)
class TensorSummary:
    """Statistics over all values in a tensor, in float64 for any dtype.

    Attributes:
        count: The number of values.
        mean: The mean. This and the next three are NaN for an empty tensor, and if any value is
            NaN.
        std: The standard deviation of the population, divided by ``count``.
        minimum: The smallest value.
        maximum: The largest value.
        norm: The square root of the sum of squares.
        nans: The number of values that are NaN.
        infs: The number of values that are infinite.
        zeros: The number of values that are 0.
        subnormals: The number of values other than 0 below the smallest normal number of the
            tensor's dtype.
        quantiles: Quantiles by share, such as 0.5 for the median, of the values that are not NaN,
            with linear interpolation; empty unless requested.
        finite: The statistics of the finite values; None if all values are finite.
    """

    count: int
    mean: float
    std: float
    minimum: float
    maximum: float
    norm: float
    nans: int
    infs: int
    zeros: int
    subnormals: int
    quantiles: Mapping[float, float]
    finite: TensorSummary | None = None


@dataclass(frozen=True)
class _Moments:
    """The count, the mean and the sum of squared distances of a part of the values."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, chunk: torch.Tensor) -> _Moments:
        mean = chunk.mean()
        return cls(chunk.numel(), mean.item(), (chunk - mean).square_().sum().item())

    def joined(self, other: _Moments) -> _Moments:
        """Return the moments of both parts together (Chan, Golub, LeVeque 1979)."""
        count = self.count + other.count
        distance = other.mean - self.mean
        if not math.isfinite(distance):
            return _Moments(count, self.mean + other.mean, math.nan)
        weight = other.count / count
        return _Moments(
            count,
            self.mean + distance * weight,
            self.squares + other.squares + distance * distance * self.count * weight,
        )


def summarise(values: Any, quantiles: Sequence[float] = ()) -> TensorSummary:
    """Return the statistics of a tensor, computed in one pass over its values.

    Sums are computed in float64 and around the mean, so neither a large mean nor half precision
    reduces the accuracy. Quantiles need an additional sort.

    Args:
        values: Tensor of any shape and any real dtype, including integers and booleans, or a value
            that ``torch.as_tensor`` accepts.
        quantiles: Shares from 0 to 1 for which to return quantiles.

    Raises:
        UsageTypeError: The values are not real numbers.
        UsageValueError: A share is not from 0 to 1.
    """
    return _summary_of(_real(values).reshape(-1), quantiles)


def _summary_of(flat: torch.Tensor, quantiles: Sequence[float]) -> TensorSummary:
    """Return the statistics of a tensor with one axis, as ``summarise`` does."""
    tiny = torch.finfo(flat.dtype).tiny if flat.dtype.is_floating_point else 0.0
    moments = _Moments()
    nans = infs = zeros = subnormals = 0
    minimum, maximum = math.inf, -math.inf
    for start in range(0, flat.numel(), _CHUNK):
        wide = flat[start : start + _CHUNK].to(torch.float64)
        moments = moments.joined(_Moments.of(wide))
        zeros += wide.numel() - int(wide.count_nonzero())
        low, high = (bound.item() for bound in torch.aminmax(wide))
        minimum, maximum = _least(minimum, low), -_least(-maximum, -high)
        if not math.isfinite(low) or not math.isfinite(high):
            nans += int(wide.isnan().sum())
            infs += int(wide.isinf().sum())
        if tiny:
            subnormals += int(((wide != 0) & (wide.abs() < tiny)).sum())
    empty = flat.numel() == 0
    return TensorSummary(
        flat.numel(),
        math.nan if empty else moments.mean,
        math.nan if empty else math.sqrt(moments.squares / moments.count),
        math.nan if empty else minimum,
        math.nan if empty else maximum,
        0.0 if empty else _norm(moments, infs),
        nans,
        infs,
        zeros,
        subnormals,
        _quantiles(flat, quantiles),
        _summary_of(flat[flat.isfinite()], quantiles) if nans or infs else None,
    )


def step_norms(values: Any) -> torch.Tensor:
    """Return the norm of each step in a tensor from a queue: of each entry on its first axis.

    Args:
        values: Shape ``(steps, ...)``, any real dtype; a single number counts as one step.

    Returns:
        Shape ``(steps,)``, float64. Values that are NaN or infinite are left out.

    Raises:
        UsageTypeError: The values are not real numbers.
    """
    tensor = _real(values)
    norms = [
        torch.linalg.vector_norm(step[step.isfinite()], dtype=torch.float64)
        for step in (tensor if tensor.dim() else tensor.reshape(1)).to(torch.float64)
    ]
    return torch.stack(norms) if norms else torch.zeros(0, dtype=torch.float64)


def _real(values: Any) -> torch.Tensor:
    tensor = torch.as_tensor(values).detach().to("cpu")
    if tensor.dtype.is_complex:
        raise UsageTypeError(
            f"summarise: there are no statistics of {tensor.dtype} numbers; pass the real and the "
            "imaginary part, or the absolute value."
        )
    return tensor


def _least(one: float, other: float) -> float:
    """Return the smaller of two numbers; NaN if one of them is NaN."""
    return math.nan if math.isnan(one) or math.isnan(other) else min(one, other)


def _norm(moments: _Moments, infs: int) -> float:
    if infs and not math.isnan(moments.mean):
        return math.inf
    return math.sqrt(moments.squares + moments.count * moments.mean * moments.mean)


def _quantiles(flat: torch.Tensor, shares: Sequence[float]) -> dict[float, float]:
    if not shares:
        return {}
    for share in shares:
        if not 0 <= share <= 1:
            raise UsageValueError(f"summarise: a quantile's share is from 0 to 1, got {share}.")
    wide = flat.to(torch.float64)
    ordered = wide[~wide.isnan()].sort().values
    if not ordered.numel():
        return dict.fromkeys(shares, math.nan)
    found = {}
    for share in shares:
        place = share * (ordered.numel() - 1)
        below = ordered[math.floor(place)].item()
        above = ordered[math.ceil(place)].item()
        part = place - math.floor(place)
        found[share] = below if not part or below == above else below + (above - below) * part
    return found


def named_leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a nest of dictionaries, tuples and lists, each with its path.

    Args:
        values: A tensor, or a nest of them.
        name: Path of the nest; ``/`` separates its parts.
    """
    if isinstance(values, Mapping):
        parts = [(str(key), value) for key, value in values.items()]
    elif isinstance(values, (tuple, list)):
        parts = [(str(index), value) for index, value in enumerate(values)]
    else:
        yield name, values
        return
    for part, value in parts:
        yield from named_leaves(value, f"{name}/{part}" if name else part)


def step_title(step: int) -> str:
    """Return the lines before the table of a step, counted from 0: a blank line, and the title."""
    return f"\nStep {step} - Summary Stats"


def epoch_title(epoch: int) -> str:
    """Return the line before the table of an epoch, counted from 1."""
    return f"Epoch {epoch} - Summary Stats"


def summary_table(tensors: Mapping[str, Any], title: str = "", *, width: int | None = None) -> str:
    """Return a table of statistics, with a line for each tensor.

    The columns are index, name, mean, standard deviation (of the population), minimum, maximum,
    whether there is any NaN, and whether there is any infinity. Numbers have six decimals; small
    numbers that would become 0.000000 have three significant digits.

    Args:
        tensors: Tensors by name, or a nest of tensors; the statistics are over all values in a
            tensor.
        title: The first line, such as ``epoch_title(1)``; empty for none.
        width: The largest width of the lines (characters); columns that do not fit go below. None
            for the width of the terminal, or for no limit if the output is a file.

    Returns:
        Lines without a newline at the end; all columns are padded with spaces, including the last
        one.
    """
    rows = [
        (
            name,
            *map(_fixed, (found.mean, found.std, found.minimum, found.maximum)),
            *(str(bool(number)) for number in (found.nans, found.infs)),
        )
        for name, found in ((name, summarise(one)) for name, one in named_leaves(tensors))
    ]
    header = ("Name", "Mean", "Std", "Minimum", "Maximum", "NaNs", "infs")
    return _table(header, rows, (12, 12, 12, 12, 7, 7), title, width)


def finite_lines(tensors: Mapping[str, Any]) -> list[str]:
    """Return a line for each tensor with NaN or infinities: their number, and the other values.

    Args:
        tensors: Tensors by name, or a nest of tensors.
    """
    lines = []
    for name, tensor in named_leaves(tensors):
        found = summarise(tensor)
        if found.finite is None:
            continue
        rest = found.finite
        line = f"{name}: {found.nans} NaN and {found.infs} infinite of {found.count}"
        if rest.count:
            line += (
                f"; the others: mean {rest.mean:.3g}, std {rest.std:.3g}, "
                f"from {rest.minimum:.3g} to {rest.maximum:.3g}"
            )
        lines.append(line + ".")
    return lines


def extended_table(
    tensors: Mapping[str, Any],
    title: str = "",
    weights: Mapping[str, Any] | None = None,
    *,
    steps: bool = False,
    width: int | None = None,
) -> str:
    """Return a table with more statistics than ``summary_table``, with a line for each tensor.

    Numbers have six significant digits, also small ones. NaN and infinities are counted, and the
    other columns are statistics of the finite values. Zeros and subnormals (below the smallest
    normal number of the tensor's dtype) are signs of underflow; 1%, 50% and 99% are quantiles.

    Args:
        tensors: Tensors by name, or a nest of tensors; the statistics are over all values in a
            tensor.
        title: The first line, such as ``epoch_title(1)``; empty for none.
        weights: Weights by name; they add the column ``Ratio`` for tensors whose name (without
            ``_grad``) is among them: the norm of the tensor divided by the norm of the weight. If
            the tensor has one more axis, the first one, this is the root mean square of the norms
            of its entries. For updates it is the update/weight ratio; for gradients in SGD,
            multiply it by the learning rate to get that ratio.
        steps: Whether the first axis of each tensor counts steps, as in the result of a queue:
            instead of the norm of all steps together, ``NormFirst``, ``NormLast`` and ``NormMax``
            are norms of single steps.
        width: As for ``summary_table``.
    """
    header = ["Name", "Mean", "Std", "Minimum", "Maximum"]
    header += [*(["NormFirst", "NormLast", "NormMax"] if steps else ["Norm"]), "1%", "50%", "99%"]
    header += ["NaNs", "infs", "Zeros", "Subnormals"]
    rows = []
    for name, tensor in named_leaves(tensors):
        found = summarise(tensor, _QUANTILES)
        shown = found.finite or found
        numbers = [shown.mean, shown.std, shown.minimum, shown.maximum]
        numbers += _norms_of_steps(tensor) if steps else [shown.norm]
        counts = [found.nans, found.infs, found.zeros, found.subnormals]
        row = [name, *map(_short, [*numbers, *shown.quantiles.values()]), *map(str, counts)]
        if weights is not None:
            row.append(_ratio(found, weights.get(name.removesuffix("_grad"))))
        rows.append(row)
    widths = [13] * (10 if steps else 8) + [9] * 3 + [11]
    if weights is not None:
        header.append("Ratio")
        widths.append(13)
    return _table(header, rows, widths, title, width)


def _norms_of_steps(tensor: Any) -> list[float]:
    norms = step_norms(tensor)
    return [norms[0].item(), norms[-1].item(), norms.max().item()] if len(norms) else [math.nan] * 3


def _ratio(found: TensorSummary, weight: Any) -> str:
    if weight is None:
        return ""
    of_weight = summarise(weight)
    if not of_weight.count or not of_weight.norm:
        return "nan"
    entries = max(1.0, found.count / of_weight.count)
    return _short(found.norm / math.sqrt(entries) / of_weight.norm)


_short: Callable[[float], str] = "{:.6g}".format


def _fixed(number: float) -> str:
    """Return a number with six decimals, or with three digits if all decimals would be zero."""
    return f"{number:.3g}" if 0 < abs(number) < _SMALL else f"{number:.6f}"


def _table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    widths: Sequence[int],
    title: str,
    width: int | None,
) -> str:
    """Return lines of columns: an index, a name padded to the longest plus 5, and the others."""
    name = max((len(row[0]) for row in rows), default=0) + 5
    text = table(
        ("Index", *header),
        [(str(index), *row) for index, row in enumerate(rows)],
        (5, name, *widths),
        fixed=2,
        width=terminal_width() if width is None else width,
    )
    return f"{title}\n{text}" if title else text
