"""Writes and reads ``docs/ops.md``: what was measured, a row for each operator and module."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from popsim_torch.files.operators import REFUSED
from tests.coverage.cases import DTYPES, KINDS, WITH_GRADIENT, Case
from tests.coverage.outcome import NOTHING_TO_COMPARE, Outcome
from tests.coverage.run import ROOT, Result

PAGE = ROOT / "docs" / "ops.md"
YES, NO, NOTHING = "yes", "**no**", "-"
GOALS = {
    ("ops", "forward"): 0.99,
    ("ops", "in place"): 0.99,
    ("ops", "gradient"): 0.98,
    ("ops", "complex forward"): 0.98,
    ("ops", "complex gradient"): 0.98,
    ("modules", "forward"): 1.0,
    ("modules", "gradient"): 1.0,
}
"""The least share of what can be compared that has to agree."""
# Results that differ from eager PyTorch's by design; docs/how_it_works.md has the reasons.
_BY_DESIGN = {
    "bfloat16": "held as float32",
    "bincount": "numbers after the last bin of `minlength` are not counted",
}
_TITLES = {"ops": "Operators", "modules": "Modules"}
ANSWERS = (*KINDS, "complex forward", "complex gradient")
"""The columns that say yes or no."""
_COLUMNS = ("runs as", "dtypes", *ANSWERS, "limits")

_INTRO = """\
# PyTorch's operators

PyTorch tests its own operators and modules with two databases, which have arguments for calls of
each (`op_db` and `module_db` in `torch.testing`). `make coverage-ops` makes these calls in models
on the device, compares them with eager PyTorch on the CPU, and writes this page. An operator agrees
if all of its calls do, in structure, shapes, dtypes and values. Gradients are those of all
arguments and parameters that have one, in a training model. *Forward*, *in place* and *gradient*
are of float32, *complex* of complex64.{calls}

{totals}

These rules hold for all:

* The device has no 64-bit numbers: results of int64 come back as int32, float64 and bfloat16 are
  held as float32.
* Tensors without values are refused as inputs (`Zero-sized tensors are unsupported`), as in
  PopTorch. Weights and intermediate tensors may be empty.
* Where values decide the shape of a result (`nonzero`, `unique`), they have to be known when the
  model is traced: numbers, host tensors, or buffers of integers. The same holds for integers that
  an operator reads before it runs.
* Drawn numbers are compared by the means of many calls. Dropout is off in an inference model,
  whatever its arguments say.
* Complex numbers are complex64, and there are none of half precision: what gives them in eager
  PyTorch is refused. [Complex numbers](complex.md) has the rules.
* Sparse, quantised and nested tensors are refused.

*Runs as* says whether results come from ops of the device (native), from PyTorch's kernel inside
of the program (ATen), or from both. *Dtypes* are those that agree, of {dtypes}.
Operators that have none of them on the CPU are left out. `-`: there is nothing to compare.
"""


@dataclass(frozen=True)
class Row:
    """What the page says of an operator or a module.

    Attributes:
        group: "ops" or "modules".
        name: The name in the database.
        cells: The texts of the other columns, by title.
    """

    group: str
    name: str
    cells: dict[str, str]


def status(outcomes: Sequence[Outcome]) -> str:
    """Return the text of a cell for the outcomes of all calls."""
    if any(is_failure(outcome) for outcome in outcomes):
        return NO
    return YES if any(outcome.kind == "works" for outcome in outcomes) else NOTHING


def is_failure(outcome: Outcome) -> bool:
    """Return whether a call does not agree although it could be compared."""
    if not REFUSED.keys() >= set(outcome.foreign):
        return True
    return outcome.kind != "works" and outcome.kind not in NOTHING_TO_COMPARE


def judged(case: Case, outcome: Outcome) -> Outcome:
    """Return an outcome, with the differences that are meant."""
    if outcome.kind == "differs" and case.name in _BY_DESIGN:
        return replace(outcome, kind="works", reason=_BY_DESIGN[case.name])
    return outcome


def rows_of(results: Iterable[Result]) -> list[Row]:
    """Return the rows for results."""
    by_name: dict[tuple[str, str], dict[Case, list[Outcome]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for result in results:
        case = result.case
        by_name[case.group, case.name][case].append(judged(case, result.outcome))
    return [
        Row(group, name, _cells(cases))
        for (group, name), cases in sorted(by_name.items(), key=lambda item: item[0])
    ]


def column_of(case: Case) -> str:
    """Return the column with the answer for a case; "dtypes" lists those without their own."""
    if case.dtype not in WITH_GRADIENT:
        return "dtypes"
    return case.kind if case.dtype == "float32" else f"complex {case.kind}"


def _cells(cases: dict[Case, list[Outcome]]) -> dict[str, str]:
    answers = {column_of(case): status(outcomes) for case, outcomes in cases.items()}
    agreeing = {
        case.dtype
        for case, outcomes in cases.items()
        if case.kind == "forward" and status(outcomes) == YES
    }
    return {
        "runs as": _runs_as(cases),
        "dtypes": ", ".join(dtype for dtype in DTYPES if dtype in agreeing),
        **{column: answers.get(column, NOTHING) for column in ANSWERS},
        "limits": "; ".join(_limits(cases)),
    }


def _runs_as(cases: dict[Case, list[Outcome]]) -> str:
    """Return who computes the results: of float32, if there are any."""
    ops: set[str] = set()
    for case, outcomes in sorted(cases.items(), key=lambda item: list(DTYPES).index(item[0].dtype)):
        if case.kind != "gradient":
            ops.update(op for outcome in outcomes for op in outcome.ops)
        if ops and case.dtype != "float32":
            break
    ops -= {"anchor", "copy"}  # they hand results over
    if not any(outcome.ops for outcomes in cases.values() for outcome in outcomes):
        return ""
    if "aten" not in ops:
        return "native"
    return "ATen" if ops == {"aten"} else "both"


def _limits(cases: dict[Case, list[Outcome]]) -> Iterator[str]:
    outcomes = [outcome for found in cases.values() for outcome in found]
    kinds = Counter(outcome.kind for outcome in outcomes)
    for kind in ("dynamic", "half complex", "sparse", "python"):
        if kinds[kind]:
            yield NOTHING_TO_COMPARE[kind]
    if any(outcome.known and outcome.kind == "works" for outcome in outcomes):
        yield "some integers have to be known"
    yield from sorted({o.reason for o in outcomes if o.kind == "works" and o.reason})
    failures: dict[str, list[str]] = {}
    for case, found in cases.items():
        column = column_of(case)
        where = case.dtype if column == "dtypes" else column
        for text in {short(outcome): None for outcome in found if is_failure(outcome)}:
            failures.setdefault(text, []).append(where)
    for text, places in failures.items():
        yield f"{', '.join(places)}: {text}"


def short(outcome: Outcome) -> str:
    """Return a reason in a few words, without files and lines."""
    unlisted = ", ".join(set(outcome.foreign) - REFUSED.keys())
    if outcome.kind == "works" and unlisted:
        return f"files/operators.py has no {unlisted}"
    text = re.sub(r"'poptorch_\w+': |( at)? ?\(?/[\w/.-]+\.py:\d+\)?", "", outcome.reason)
    text = re.split(r"(?<=[^.])\. |\n", text)[0].strip().rstrip(".")
    text = text.replace("|", "\\|")
    return f"{outcome.kind}: {text[:100]}" if outcome.kind != "error" else text[:120]


def totals_of(rows: Iterable[Row]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return for each group and kind how many rows agree, and how many were compared."""
    counts: dict[tuple[str, str], Counter[str]] = {key: Counter() for key in GOALS}
    for row in rows:
        for column in ANSWERS:
            if (row.group, column) in counts:
                counts[row.group, column][row.cells[column]] += 1
    return {key: (found[YES], found[YES] + found[NO]) for key, found in counts.items()}


def written(rows: Sequence[Row], most: int | None = None) -> str:
    """Return the page.

    Args:
        rows: What was measured.
        most: How many calls were made of a case that has as many; None if all were.
    """
    calls = (
        ""
        if most is None
        else f"""
This page is of {most} or more calls of each, drawn once, and one for each other dtype."""
    )
    lines = ["| | agree | compared | share |", "|---|---|---|---|"]
    for (group, kind), (agree, compared) in totals_of(rows).items():
        share = f"{agree / compared:.1%}" if compared else NOTHING
        lines.append(f"| {_TITLES[group]}, {kind} | {agree} | {compared} | {share} |")
    dtypes = f"{', '.join(list(DTYPES)[:-1])} and {list(DTYPES)[-1]}"
    parts = [_INTRO.format(totals="\n".join(lines), dtypes=dtypes, calls=calls)]
    for group, title in _TITLES.items():
        parts.append(f"## {title}\n")
        parts.append(f"| name | {' | '.join(_COLUMNS)} |")
        parts.append("|---" * (len(_COLUMNS) + 1) + "|")
        for row in rows:
            if row.group == group:
                cells = " | ".join(row.cells[column] for column in _COLUMNS)
                parts.append(f"| `{row.name}` | {cells} |")
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def read(path: Path = PAGE) -> tuple[list[Row], dict[tuple[str, str], tuple[int, int]]]:
    """Return the rows of a page, and its totals."""
    rows, totals, group = [], {}, ""
    groups = {title: group for group, title in _TITLES.items()}
    for line in path.read_text().splitlines():
        if line.startswith("## "):
            group = groups[line.removeprefix("## ")]
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if group and line.startswith("| `"):
            named = dict(zip(_COLUMNS, cells[1:], strict=True))
            rows.append(Row(group, cells[0].strip("`"), named))
        title, _, kind = cells[0].partition(", ") if cells else ("", "", "")
        if title in groups and kind:
            totals[groups[title], kind] = (int(cells[1]), int(cells[2]))
    return rows, totals
