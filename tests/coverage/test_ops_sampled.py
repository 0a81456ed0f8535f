"""PyTorch's own operators and modules on the device: a sample, and what docs/ops.md says of all."""

import math
import random
import re
from dataclasses import replace

import pytest
import torch

from popsim_torch.files import operators
from tests.coverage import eager
from tests.coverage.call import Call
from tests.coverage.cases import DTYPES, MODULES, OPS, all_cases, chosen_calls, run_call
from tests.coverage.compare import values_problem
from tests.coverage.outcome import Outcome
from tests.coverage.page import (
    ANSWERS,
    GOALS,
    NO,
    NOTHING,
    PAGE,
    YES,
    column_of,
    is_failure,
    judged,
    read,
    rows_of,
    short,
    totals_of,
    written,
)
from tests.coverage.run import Result, run_cases

_SAMPLE = 34
_COMPLEX_SAMPLE = 10
ROWS, TOTALS = read()
CELLS = {(row.group, row.name): row.cells for row in ROWS}


def agrees(case) -> bool:
    """Whether the page says that a case agrees."""
    cells = CELLS[case.group, case.name]
    column = column_of(case)
    if column in ANSWERS:
        return cells[column] == YES
    return case.dtype in cells["dtypes"].split(", ")


def failures(cases, most, seconds=60) -> list[str]:
    """Run cases; return what does not agree with eager PyTorch."""
    found: list[str] = []

    def note(result: Result) -> None:
        outcome = judged(result.case, result.outcome)
        if is_failure(outcome):
            found.append(f"{result.case} {result.number} {result.shapes}: {outcome}")

    run_cases(cases, note, most=most, seconds=seconds)
    return found


def test_a_sample_of_all_cases_agrees():
    cases = [case for case in all_cases() if agrees(case)]
    complex_cases = [case for case in cases if case.dtype == "complex64"]
    draw = random.Random(7)
    drawn = draw.sample(cases, _SAMPLE) + draw.sample(complex_cases, _COMPLEX_SAMPLE)
    assert not failures(drawn, most=1)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_cases_are_as_the_page_says():
    assert not failures([case for case in all_cases() if agrees(case)], most=3)


def test_the_page_has_every_operator_and_module():
    assert set(CELLS) == {(case.group, case.name) for case in all_cases()}
    left_out = set(OPS) - {row.name for row in ROWS}
    assert all(not set(DTYPES.values()) & set(OPS[name].dtypes) for name in left_out)
    assert {row.name for row in ROWS if row.group == "modules"} == set(MODULES)


def test_the_totals_of_the_page_are_those_of_its_rows():
    assert totals_of(ROWS) == TOTALS
    assert set(TOTALS) == set(GOALS)


@pytest.mark.parametrize("key", GOALS, ids=" ".join)
def test_the_goals_are_reached(key):
    agree, compared = TOTALS[key]
    assert compared > 100 and agree >= math.ceil(GOALS[key] * compared)


def test_nothing_fails_silently():
    """What fails does so with the package's own error."""
    bad = re.compile(r": (raises|differs|crash|hang|harness|samples): ")
    assert [row.name for row in ROWS if bad.search(row.cells["limits"])] == []


# --- The instruments ----------------------------------------------------------


def case_of(name, kind="forward"):
    return next(c for c in all_cases() if (c.name, c.kind, c.dtype) == (name, kind, "float32"))


def test_a_wrong_result_is_seen():
    x = torch.randn(4, 5)

    def wrong(value):
        # The trace takes the other branch.
        return value.sin() if value.device.type == "cpu" else value.sin() * 1.001

    outcome = run_call(case_of("sin"), Call(wrong, ((x,), {})))
    assert outcome.kind == "differs" and is_failure(outcome)


def test_a_wrong_gradient_is_seen():
    x = torch.randn(4, 5, requires_grad=True)

    def wrong(value):
        return value * (2.0 if value.device.type == "cpu" else 2.001)

    assert run_call(case_of("sin", "gradient"), Call(wrong, ((x,), {}))).kind == "differs"


def test_a_wrong_complex_result_and_gradient_are_seen():
    z = torch.randn(4, 5, dtype=torch.cfloat, requires_grad=True)

    def wrong(value):
        return value.sin() if value.device.type == "cpu" else value.sin().conj()

    def half(value):
        return value * (1j if value.device.type == "cpu" else 1.001j)

    for function in (wrong, half):
        for kind in ("forward", "gradient"):
            outcome = run_call(case_of("sin", kind), Call(function, ((z,), {})))
            assert outcome.kind == "differs", (function, kind)


def test_an_operator_that_no_list_has_is_seen(monkeypatch):
    case, call = case_of("erfinv"), Call(torch.erfinv, ((torch.rand(4),), {}))
    assert not is_failure(run_call(case, call))
    monkeypatch.setattr(operators, "OPERATORS", frozenset())
    outcome = run_call(case, call)
    assert outcome.kind == "works" and outcome.foreign == ("aten::erfinv",) and is_failure(outcome)
    assert short(outcome) == "files/operators.py has no aten::erfinv"


def test_wrong_drawn_numbers_are_seen():
    def wrong(value):
        return torch.rand_like(value) * (1.0 if value.device.type == "cpu" else 1.3)

    assert run_call(case_of("sin"), Call(wrong, ((torch.ones(50),), {}))).kind == "differs"


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.nonzero(), "dynamic"),
        (lambda x: x.to_sparse(), "sparse"),
        (lambda x: x.sum().item(), "python"),
        (lambda x: x.reshape(7), "eager"),
        (lambda x: torch.complex(x, x), "works"),
        (lambda x: torch.complex(x.half(), x.half()), "half complex"),
        (lambda x: x.sin(), "works"),
    ],
)
def test_kinds_of_outcomes(function, kind):
    assert run_call(case_of("sin"), Call(function, ((torch.randn(4, 5),), {}))).kind == kind


def test_an_empty_argument_is_refused():
    call = Call(torch.sin, ((torch.zeros(0, 3),), {}))
    outcome = run_call(case_of("sin"), call)
    assert outcome.kind == "empty" and "Zero-sized tensors" in outcome.reason


def test_samples_are_the_same_each_time():
    first, second = (chosen_calls(case_of("add"), 3) for _ in range(2))
    for (number, call), (other_number, other) in zip(first, second, strict=True):
        assert number == other_number
        assert all(map(torch.equal, call.given, other.given))


def test_gradients_in_float64_are_nearer():
    call = Call(torch.exp, ((torch.randn(5, requires_grad=True),), {}))
    near, exact = eager.gradients(call), eager.wide_gradients(call)
    assert exact[0].dtype == torch.float64 and not values_problem([near[0]], [near[0]], [exact[0]])


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "code"), [(60, "os.abort()"), (2, "time.sleep(99)")])
def test_a_crash_or_hang_is_the_outcome_of_its_call(monkeypatch, tmp_path, seconds, code):
    (tmp_path / "broken_worker.py").write_text(
        "import os, time\n"
        "from tests.coverage import worker\n"
        "run = worker.run_call\n"
        "def broken(case, call):\n"
        f"    {code} if case.name == 'cos' else None\n"
        "    return run(case, call)\n"
        "worker.run_call = broken\n"
        "worker.main()\n"
    )
    monkeypatch.setattr("tests.coverage.run.WORKER", [str(tmp_path / "broken_worker.py")])
    results: list[Result] = []
    run_cases([case_of("cos"), case_of("sin")], results.append, most=1, seconds=seconds)
    kinds = {result.case.name: result.outcome.kind for result in results}
    assert kinds == {"cos": "crash" if "abort" in code else "hang", "sin": "works"}


# --- The page -----------------------------------------------------------------


def test_a_page_can_be_read_again(tmp_path):
    case = case_of("sin")
    error = Outcome("error", "'poptorch_py_error': No | at /a/b.py:3: use x. More of it.")
    results = [
        Result(case, 0, "", Outcome("works", ops=("map",))),
        Result(replace(case, kind="gradient"), 0, "", error),
        Result(replace(case, name="nonzero"), 0, "", Outcome("dynamic")),
        Result(replace(case, group="modules", name="nn.Linear"), 0, "", Outcome("works")),
    ]
    page = tmp_path / "page.md"
    page.write_text(written(rows_of(results)))
    rows, totals = read(page)
    assert {row.name: row.cells["forward"] for row in rows} == {
        "nn.Linear": YES,
        "nonzero": NOTHING,
        "sin": YES,
    }
    (sine,) = (row for row in rows if row.name == "sin")
    assert sine.cells["gradient"] == NO and sine.cells["runs as"] == "native"
    assert sine.cells["limits"] == r"gradient: No \|: use x"
    assert totals["ops", "forward"] == (1, 1) and totals["ops", "gradient"] == (0, 1)
    assert PAGE.name == "ops.md"
