"""Pictures of records: histograms over time, the flow of gradients, where NaN is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from popsim_torch.errors import Error, UsageValueError, closest_names, example_names, listed_names
from popsim_torch.observe.record import Record
from popsim_torch.observe.sinks.bins import Bands, Floats, bands
from popsim_torch.observe.sinks.series import Series, label, series_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["gradient_flow", "histogram_over_time", "nan_map"]

_GRADIENT = "Gradient___"
_MOST_COLUMNS = 400
_MOST_ROWS = 60
_FIRST, _LAST = "#8aa6c1", "#1f5a92"
_NAN, _INF = "#c0392b", "#e39b2d"


def histogram_over_time(records: Iterable[Record], name: str) -> Figure:
    """Draw how the values of a tensor are distributed, step by step.

    The axes are steps and values; the colour is the share of the values in a bin. Bins are those of
    ``Histogram``, powers of two: the axis of values is logarithmic in both directions from 0.

    Args:
        records: Records, of any tensors.
        name: The tensor; ``"x (replica 1)"`` is ``x`` of replica 1.

    Returns:
        A ``matplotlib.figure.Figure``, which notebooks show and ``savefig`` writes.

    Raises:
        UsageValueError: No record has this name, or none of them a histogram.
        Error: matplotlib is not installed.
    """
    figure = _figure("histogram_over_time", (8.5, 4.6))
    listed = list(records)
    own = [record for record in listed if label(record) == name]
    if not own:
        names = dict.fromkeys(label(record) for record in listed)
        near = closest_names(name, names) or example_names(name, names)
        there = f"There is {listed_names(near)}." if near else "There are no records."
        raise UsageValueError(f"histogram_over_time: no record of a tensor '{name}'. {there}")
    series = Series(name, most_histograms=_MOST_COLUMNS)
    for record in own:
        series.add(record)
    places, rows = series.histograms()
    if not rows:
        raise UsageValueError(
            f"histogram_over_time: the records of '{name}' have no histogram. Ask for "
            "poptorch.Histogram() when you observe it."
        )
    axes = figure.subplots()
    found = bands(rows)
    shares = found.counts / np.maximum(found.counts.sum(1, keepdims=True), 1)
    heights = np.arange(len(found.edges))
    image = axes.pcolormesh(
        _column_edges(places),
        heights,
        np.ma.masked_equal(shares.T, 0),
        cmap="viridis",
        norm=_log_norm(shares),
        rasterized=True,
    )
    _label_values(axes, found)
    axes.set(title=name, xlabel="step (device iteration)", ylabel="value")
    figure.colorbar(image, ax=axes, label="share of the values")
    return figure


def _log_norm(shares: Floats) -> Any:
    from matplotlib.colors import LogNorm

    least = float(shares[shares > 0].min()) if (shares > 0).any() else 0.1
    return LogNorm(min(least, 0.1), 1.0)


def _column_edges(places: Sequence[float]) -> Floats:
    """Return where the columns of a picture begin and end, each around its place."""
    middles = np.asarray(places, np.float64)
    if len(middles) == 1:
        return np.array([middles[0] - 0.5, middles[0] + 0.5])
    between = (middles[1:] + middles[:-1]) / 2
    first, last = middles[0] * 2 - between[0], middles[-1] * 2 - between[-1]
    return np.concatenate([[first], between, [last]])


def _label_values(axes: Axes, found: Bands) -> None:
    """Write the values of some edges beside the axis."""
    every = max(1, math.ceil(len(found.edges) / 14))
    zero = int(np.searchsorted(found.edges, 0.0))  # the upper edge of the bin of zeros
    above = list(range(zero + every - 1, len(found.edges), every))
    below = list(range(zero - every, -1, -every))
    ticks = {float(place): f"{found.edges[place]:.1e}" for place in (*below, *above)}
    ticks[zero - 0.5] = "0"
    axes.set_yticks(list(ticks), list(ticks.values()))


def gradient_flow(records: Iterable[Record]) -> Figure:
    """Draw how large the gradients of the layers are, at the first step and at the last one.

    Args:
        records: Records. Those whose name begins with ``Gradient___`` are drawn; if there are none,
            all are. They need the norm.

    Returns:
        A ``matplotlib.figure.Figure``: a pair of bars for each tensor, from the input's side of the
        model at the top to the loss at the bottom as far as the order of the records shows it. The
        axis is logarithmic.

    Raises:
        UsageValueError: No record has a norm.
        Error: matplotlib is not installed.
    """
    found = [series for series in series_of(records).values() if "norm" in series.has]
    gradients = [series for series in found if series.name.startswith(_GRADIENT)]
    # A program computes the gradients from the loss to the input.
    shown = gradients[::-1] if gradients else found
    if not shown:
        raise UsageValueError(
            "gradient_flow: no record has a norm. Ask for poptorch.Moments() when you observe "
            'tensors such as "Gradient___*".'
        )
    figure = _figure("gradient_flow", (8.5, 1.3 + 0.36 * len(shown)))
    axes = figure.subplots()
    names = [series.name.removeprefix(_GRADIENT) for series in shown]
    rows = np.arange(len(shown))
    first = [_drawn(series.column("norm")[0]) for series in shown]
    last = [_drawn(series.column("norm")[-1]) for series in shown]
    steps = [f"{place:g}" for place in (shown[0].positions()[0], shown[0].positions()[-1])]
    axes.barh(rows - 0.19, first, 0.36, color=_FIRST, label=f"step {steps[0]}")
    axes.barh(rows + 0.19, last, 0.36, color=_LAST, label=f"step {steps[1]}")
    axes.set_yticks(rows, names)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    _log_axis(axes, [*first, *last])
    axes.set(xlabel="norm", title="Gradients by layer" if gradients else "Norms by tensor")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower right", ncols=2, frameon=False)
    return figure


def _drawn(norm: float) -> float:
    """Return a norm that a logarithmic axis can show, or NaN."""
    return norm if math.isfinite(norm) and norm > 0 else math.nan


def _log_axis(axes: Axes, numbers: Sequence[float]) -> None:
    there = [number for number in numbers if not math.isnan(number)]
    if there:
        axes.set_xscale("log")
        axes.set_xlim(min(there) / 3, max(there) * 3)


def nan_map(records: Iterable[Record]) -> Figure:
    """Draw in which tensors and at which steps there is NaN or an infinity.

    Args:
        records: Records.

    Returns:
        A ``matplotlib.figure.Figure``: a row for each tensor, in the order of the program, a column
        for each step. The colour says whether there is NaN, or only an infinity. Of more than 60
        tensors those with neither are left out first.

    Raises:
        UsageValueError: There are no records.
        Error: matplotlib is not installed.
    """
    series = list(series_of(records).values())
    if not series:
        raise UsageValueError("nan_map: there are no records.")
    bad = [one for one in series if _bad(one).any()]
    shown = series if len(series) <= _MOST_ROWS else bad[:_MOST_ROWS]
    left_out = len(series) - len(shown)
    figure = _figure("nan_map", (8.5, 1.6 + 0.26 * max(1, len(shown))))
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    axes = figure.subplots()
    places = sorted({place for one in series for place in one.positions()})
    columns = {place: column for column, place in enumerate(places)}
    grid = np.full((max(1, len(shown)), len(places)), np.nan)
    for row, one in enumerate(shown):
        for place, kind in zip(one.positions(), _bad(one), strict=True):
            grid[row, columns[place]] = kind
    colours = ListedColormap(["#dfe6ec", _INF, _NAN])
    edges = _column_edges(places)
    axes.pcolormesh(edges, np.arange(len(grid) + 1), grid, cmap=colours, vmin=0, vmax=2)
    axes.set_yticks(np.arange(len(shown)) + 0.5, [one.name for one in shown])
    axes.set_ylim(len(grid), 0)
    axes.hlines(np.arange(1, len(grid)), edges[0], edges[-1], color="white", linewidth=1)
    title = f"{len(bad)} of {len(series)} tensors have NaN or infinities"
    axes.set(xlabel="step (device iteration)", title=title)
    if left_out:
        axes.set_xlabel(f"step (device iteration); {left_out} tensors are not shown")
    axes.tick_params(left=False)
    axes.spines[:].set_visible(False)
    words = (("finite", "#dfe6ec"), ("infinity", _INF), ("NaN", _NAN))
    handles = [Patch(color=colour, label=word) for word, colour in words]
    figure.legend(handles=handles, loc="outside lower right", ncols=3, frameon=False)
    return figure


def _bad(series: Series) -> Floats:
    """Return 2 for each kept record with NaN, 1 for one with infinities only, 0 for the others."""
    nans, infs = (np.asarray(series.column(name)) > 0 for name in ("nans", "infs"))
    return np.where(nans, 2.0, np.where(infs, 1.0, 0.0))


def _figure(caller: str, size: tuple[float, float]) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Error(
            f"{caller}: matplotlib cannot be imported ({error}). Install it: pip install "
            "matplotlib."
        ) from error
    return Figure(figsize=size, layout="constrained")
