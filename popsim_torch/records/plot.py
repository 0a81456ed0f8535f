"""Draws how the difference of two runs grows."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from popsim_torch.errors import Error
from popsim_torch.records.difference import Difference

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_growth"]


def plot_growth(difference: Difference, path: Any) -> Figure:
    """Draw the growth of a difference; see ``Difference.plot``."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        raise Error(
            f"Difference.plot: matplotlib cannot be imported ({error}). Install it: pip install "
            "matplotlib. print(difference) shows the growth as text."
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True)
    steps = [one.step for one in difference.growth]
    counts = [one.differing for one in difference.growth]
    upper.plot(steps, counts, ".-", color="#4c9be8")
    upper.set_ylabel("tensors that differ")
    upper.set_ylim(0, 1.08 * max([1, *counts]))
    for axis in (upper.yaxis, lower.xaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    # A logarithm has no place for 0, and none for NaN or infinities in one run alone.
    shown = [one.largest if 0 < one.largest < math.inf else math.nan for one in difference.growth]
    lower.plot(steps, shown, ".-", color="#9d7fc1")
    if any(not math.isnan(one) for one in shown):
        lower.set_yscale("log")
    lower.set_ylabel("largest relative\ndifference of a norm")
    lower.set_xlabel("step")
    broken = [one.step for one in difference.growth if math.isinf(one.largest)]
    if broken:
        for axes in (upper, lower):
            axes.axvline(broken[0], color="#d1495b", linestyle="--")
        upper.set_title(f"NaN or infinities in one run from step {broken[0]} on", fontsize=10)
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure
