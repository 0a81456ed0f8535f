"""A report as text: the summary, and the operations by module and phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from popsim_torch.machine.figures import GRADES, amount, count, grade_of, shares, size, time
from popsim_torch.report.modules import tree
from popsim_torch.tables import terminal_width

if TYPE_CHECKING:
    from popsim_torch.report.modules import ModuleCost, OpCost, PhaseCost
    from popsim_torch.report.report import Report

__all__ = ["figures", "operations", "summary", "validation"]

_LEAST_SHARE = 0.0005
_MOST_MODULES = 60
_WORDS = {
    "fits": "it fits",
    "close": "close to the limit: it may or may not fit",
    "does not fit": "it does not fit",
}


def figures(report: Report) -> Iterator[tuple[str, str]]:
    """Yield the most important figures by name; simulated ones say so."""
    static = report.data["static"]
    yield "program", f"{report.name} ({'training' if static['training'] else 'inference'})"
    estimate = report.estimate
    if estimate is None:
        yield "estimate", f"none: {report.why_no_estimate}"
    else:
        yield from _simulated(report)
    yield "calls", f"{report.calls:,}, {len(report.runs)} recorded"
    for run in report.runs[-1:]:
        yield (
            "measured on this computer",
            f"{time(run.measured_seconds)} for call {run.number}; not the time of an IPU",
        )


def _simulated(report: Report) -> Iterator[tuple[str, str]]:
    estimate = report.estimate
    assert estimate is not None
    device, call = estimate["device"], estimate["call"]
    grade = grade_of(estimate["grades"])
    yield "machine", f"{device['num_ipus']} x {device['name']}, {device['tiles']} tiles each"
    yield "items in a call", batch_formula(report)
    yield (
        "simulated call",
        f"{time(call['seconds'], grade)}, {amount(call['cycles'], grade)} cycles",
    )
    if call["items_per_second"] is not None:
        yield "simulated speed", f"{amount(call['items_per_second'], grade)} items/s"
    fullest = max(report.memory, key=lambda one: one.peak, default=None)
    if fullest is not None:
        yield (
            "simulated memory",
            f"{_WORDS.get(estimate['verdict'], estimate['verdict'])}; the fullest tile has "
            f"{size(fullest.peak)} of {size(fullest.capacity)} (IPU {fullest.ipu})",
        )
    yield "grades of op cycles", f"{shares(estimate['grades'])} ({_meanings()})"
    if estimate["without_formula"]:
        some = ", ".join(estimate["without_formula"][:3])
        yield (
            "no formula",
            f"{count(len(estimate['without_formula']), 'op')}, counted as no time: {some}",
        )
    yield "validation", validation(report)


def _meanings() -> str:
    return ", ".join(f"{name} {meaning}" for name, meaning in GRADES.items() if name)


def validation(report: Report) -> str:
    """Return how this version of the model compares with published figures, as text."""
    found = report.data["validation"]
    if found is None:
        return "not known for this version"
    worst = found["worst"]
    text = f"{found['within']} of {count(found['rows'], 'published figure')} within tolerance"
    return (
        text
        if worst is None
        else f"{text}, worst {worst['id']} by {100 * abs(worst['error']):.0f} %"
    )


def batch_formula(report: Report) -> str:
    """Return how the items of a call come about: ``640 = 8 x 10 iterations x 4 x 2 replicas``."""
    estimate = report.estimate
    assert estimate is not None
    batch = estimate["batch"]
    factors = [
        "?" if batch["micro_batch"] is None else str(batch["micro_batch"]),
        f"{batch['gradient_accumulation']} micro-batches per update",
        f"{batch['device_iterations']} device iterations",
        f"{batch['replicas']} replicas",
    ]
    if not estimate["training"]:
        factors.pop(1)
    items = batch["items_per_call"]
    return f"{'?' if items is None else format(items, ',')} = {' x '.join(factors)}"


def summary(report: Report) -> str:
    """Return the summary of a report, its modules and its insights."""
    rows = list(figures(report))
    lines = [f"{name + ':':28}{value}" for name, value in rows]
    if report.estimate is not None:
        lines += ["", operations(report), ""]
        lines += [
            line
            for one in report.insights
            for line in (f"{one.about} {one.name}: {one.figure}", f"    {one.advice} {one.effect}.")
        ]
    return "\n".join(lines)


def operations(report: Report) -> str:
    """Return the table of modules and phases, with optimizer and accumulation by name."""
    if report.estimate is None:
        return f"There is no estimate: {report.why_no_estimate}."
    width = terminal_width()
    modules = report.by_module()
    total = modules[""].cycles or 1.0
    lines = [
        "Simulated cycles of a call, by module and phase",
        "".join(f"{name:>10} " for name in ("total", "forward", "backward", "update"))
        + f"{'share':>6} {'FLOPs':>8} {'variables':>10} {'grade':>5}  module",
    ]
    shown = [
        name
        for name in tree(list(modules))
        if not name or modules[name].cycles >= _LEAST_SHARE * total
    ]
    for name in shown[:_MOST_MODULES]:
        lines.append(_module_line(name, modules[name], total))
    if len(shown) < len(modules) or len(shown) > _MOST_MODULES:
        rest = len(modules) - len(shown[:_MOST_MODULES])
        lines.append(f"{'':>10} {count(rest, 'other module')} with a smaller share")
    purposes = report.by_purpose()
    if purposes:
        lines.append("")
        lines.append("Of this, for training only (simulated cycles of a call)")
        lines += [_purpose_line(name, cost, total) for name, cost in purposes.items()]
    lines += _without_formula(report.ops)
    return "\n".join(line[:width].rstrip() for line in lines)


def _module_line(name: str, cost: ModuleCost, total: float) -> str:
    path = name.split(".") if name else ["(all)"]
    label = "  " * (len(path) - 1 + bool(name)) + path[-1]
    parts = (cost.forward, cost.backward, cost.update)
    return (
        f"{amount(cost.cycles, cost.grade):>10} "
        + "".join(f"{amount(one.cycles, one.grade):>10} " for one in parts)
        + f"{cost.cycles / total:6.0%} {amount(cost.flops, 'A'):>8} {size(cost.variable_bytes):>10}"
        f" {cost.grade:>5}  {label}"
    )


def _purpose_line(name: str, cost: PhaseCost, total: float) -> str:
    return (
        f"{amount(cost.cycles, cost.grade):>10} {cost.cycles / total:6.0%}  {name} "
        f"({count(cost.ops, 'op')}, grade {cost.grade})"
    )


def _without_formula(ops: tuple[OpCost, ...]) -> list[str]:
    kinds: dict[str, int] = {}
    for op in ops:
        if not op.formula:
            kinds[op.kind] = kinds.get(op.kind, 0) + 1
    if not kinds:
        return []
    listed = ", ".join(f"{kind} ({number})" for kind, number in kinds.items())
    return ["", f"No formula, counted as no time: {listed}"]
