"""Draws a schedule as planned, and as it ran."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from popsim_torch.errors import Error
from popsim_torch.executor.schedule import Schedule, ScheduledAction, percent
from popsim_torch.executor.timeline import TimedAction, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot_schedule"]

_COLOURS = {
    "forward": "#4c9be8",
    "recompute": "#f2c14e",
    "backward": "#59b16b",
    "update": "#9d7fc1",
}
_MOST_LABELS = 400
_MOST_ROWS = 16
_GAP = 1.0
"""The width of the gap that stands for repetitions, in passes."""
_RECOMPUTATION = 0.4
"""The width of a recomputation as planned, in passes: it is a part of its backward pass."""

# A box: where it begins, its width, the kind of the action, and its label.
_Box = tuple[float, float, str, str]


def plot_schedule(schedule: Schedule, path: Any) -> Figure:
    """Draw a schedule, and below it the latest recorded run; see ``Schedule.plot``."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise Error(
            f"Schedule.plot: matplotlib cannot be imported ({error}). Install it: pip install "
            "matplotlib. print(executor.schedule()) shows the schedule as text."
        ) from error
    timeline = schedule.timeline
    panels = [schedule.num_stages]
    if timeline is not None:
        panels.append(schedule.num_stages * len(shown_replicas(schedule, timeline)))
    heights = [0.9 + 0.42 * rows for rows in panels]
    figure = Figure(figsize=(11, 1.3 + sum(heights)), layout="constrained")
    axes: list[Axes] = list(
        figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    )
    _plot_plan(axes[0], schedule)
    if timeline is not None:
        _plot_run(axes[1], schedule, timeline)
    shown = [kind for kind in _COLOURS if kind != "recompute" or schedule.recomputes]
    if not schedule.training:
        shown = ["forward"]
    figure.legend(
        handles=[Patch(color=_COLOURS[kind], label=kind) for kind in shown],
        loc="outside upper right",
        ncols=len(shown),
        frameon=False,
    )
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _plot_plan(axes: Axes, schedule: Schedule) -> None:
    """Draw the time slots; a slot is as long as the work of its busiest IPU."""
    rows: list[list[_Box]] = [[] for _ in range(schedule.num_stages)]
    ticks: list[tuple[float, str]] = []
    now = 0.0
    for slots, gap in schedule.spans():
        for slot in slots:
            ticks.append((now, str(slot)))
            now += _place(schedule.at(slot), schedule.ipus, now, rows)
        if gap:
            axes.axvspan(now, now + _GAP, color="0.92", linewidth=0)
            middle = (schedule.num_stages - 1) / 2
            axes.text(now + _GAP / 2, middle, f"x{gap}", ha="center", va="center", fontsize=8)
            now += _GAP
    _draw(axes, rows, now)
    every = -(-len(ticks) // 40)
    axes.set_xticks([at for at, _ in ticks[::every]], [text for _, text in ticks[::every]])
    axes.set_xlabel("time slot")
    axes.set_title(f"As planned: {schedule.title}", loc="left", fontsize="medium")
    _label_rows(axes, schedule.labels, [f"computes {percent(share)}" for share in schedule.use])


def _place(
    actions: Iterable[ScheduledAction], ipus: Sequence[int], begin: float, rows: list[list[_Box]]
) -> float:
    """Add the boxes of a time slot to the rows of their stages; return the length of the slot."""
    used: dict[int, float] = {}
    for one in actions:
        at = used.get(ipus[one.stage], 0.0)
        width = {"recompute": _RECOMPUTATION, "update": 0.6}.get(one.kind, 1.0)
        last = rows[one.stage][-1] if rows[one.stage] else None
        if one.kind == "backward" and last is not None and last[2] == "recompute":
            width -= last[1]
        rows[one.stage].append((begin + at, width, one.kind, str(one)))
        used[ipus[one.stage]] = at + width
    return max(used.values(), default=1.0)


def _plot_run(axes: Axes, schedule: Schedule, timeline: Timeline) -> None:
    """Draw the measured times of the last device iteration; in inference of the whole run."""
    last = max((one.device_iteration for one in timeline), default=0)
    shown: Sequence[TimedAction] = timeline.of_iteration(last) if schedule.training else timeline
    start = min((one.begin for one in shown), default=0.0)
    end = max((one.end for one in shown), default=0.0)
    unit, unit_name = (1e3, "ms") if end - start >= 2e-3 else (1e6, "us")
    replicas = shown_replicas(schedule, timeline)
    names = [(replica, stage) for replica in replicas for stage in range(schedule.num_stages)]
    rows: dict[tuple[int, int], list[_Box]] = {name: [] for name in names}
    for one in shown:
        begin, width = unit * (one.begin - start), unit * one.seconds
        label = "U" if one.micro_batch is None else f"{one.kind[0].upper()}{one.micro_batch}"
        for name in names if one.stage is None else [(one.replica, one.stage)]:
            if name in rows:
                rows[name].append((begin, width, one.kind, label))
    _draw(axes, list(rows.values()), unit * (end - start))
    axes.set_xlabel(f"time, {unit_name}")
    threads = "1 thread" if timeline.num_threads == 1 else f"{timeline.num_threads} threads"
    what = f"device iteration {last}" if schedule.training else "the whole run"
    if len(replicas) < timeline.num_replicas:
        what += f", replicas 0 to {replicas[-1]} of {timeline.num_replicas}"
    axes.set_title(f"As it ran on {threads}: {what}", loc="left", fontsize="medium")
    busy = [sum(width for _, width, _, _ in boxes) for boxes in rows.values()]
    idle = [max(1 - one / max(unit * (end - start), 1e-9), 0.0) for one in busy]
    labels = [
        schedule.labels[stage] + (f", replica {replica}" if timeline.num_replicas > 1 else "")
        for replica, stage in names
    ]
    _label_rows(axes, labels, [f"idle {share:.0%}" for share in idle])


def shown_replicas(schedule: Schedule, timeline: Timeline) -> range:
    """Return the replicas whose times are drawn: as many as fit."""
    return range(min(timeline.num_replicas, max(_MOST_ROWS // schedule.num_stages, 1)))


def _draw(axes: Axes, rows: Sequence[Sequence[_Box]], length: float) -> None:
    labelled = sum(map(len, rows)) <= _MOST_LABELS
    for row, boxes in enumerate(rows):
        for kind, colour in _COLOURS.items():
            spans = [(begin, width) for begin, width, found, _ in boxes if found == kind]
            edge = {"edgecolor": "white", "linewidth": 0.6} if labelled else {"linewidth": 0}
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolor=colour, **edge)
        for begin, width, _, text in boxes if labelled else ():
            # About 130 characters fit into the width of the picture.
            if width >= length * len(text) / 130:
                axes.text(begin + width / 2, row, text, ha="center", va="center", fontsize=8)
    axes.set_xlim(0, length or 1)
    axes.set_ylim(len(rows) - 0.4, -0.6)


def _label_rows(axes: Axes, labels: Sequence[str], shares: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    right = axes.secondary_yaxis("right")
    right.set_yticks(range(len(labels)), shares)
    right.tick_params(length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    right.spines["right"].set_visible(False)
    axes.tick_params(axis="y", length=0)
