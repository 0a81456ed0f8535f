"""What a report says: sums by module and phase, figures, advice, comparison."""

import json
import math

import pytest

import popsim_torch as poptorch
from popsim_torch.machine.figures import amount, size, time
from popsim_torch.report.modules import tree
from popsim_torch.report.report import Report
from tests.report.data import make_report


@pytest.fixture
def report():
    return Report(make_report())


@pytest.mark.parametrize(
    ("value", "grade", "text"),
    [
        (0, "A", "0"),
        (7, "A", "7.0"),
        (7, "C", "7"),
        (96, "B", "96"),
        (999, "B", "1.0 k"),
        (999_999, "A", "1.0 M"),
        (1_249_000, "A", "1.2 M"),
        (1_249_000, "C", "1 M"),
        (9_960_000, "C", "10 M"),
        (5e9, "B", "5.0 G"),
        (None, "A", "-"),
    ],
)
def test_amounts_have_two_digits_or_one(value, grade, text):
    assert amount(value, grade) == text


def test_times_and_sizes():
    assert [time(value) for value in (0.00249, 3.0, 9.99e-4, 4e-12)] == [
        "2.5 ms",
        "3.0 s",
        "1.0 ms",
        "0.0040 ns",
    ]
    assert time(0.0149, "C") == "10 ms"
    assert [size(value) for value in (0, 1024, 638_976, 5 << 30)] == [
        "0 B",
        "1.00 KiB",
        "624 KiB",
        "5.00 GiB",
    ]


def test_modules_add_up(report):
    modules = report.by_module()
    total = sum(op.cycles * op.executions for op in report.ops)
    assert math.isclose(modules[""].cycles, total)
    assert list(modules) == [""] + [f"net{rest}" for rest in ("", ".block0")] + [
        f"net.block0.fc{layer}" for layer in range(4)
    ]
    inner = sum(modules[f"net.block0.fc{layer}"].cycles for layer in range(4))
    assert math.isclose(modules["net.block0"].cycles, inner)
    own = [op for op in report.ops if op.module == "net.block0.fc2" and op.phase == "backward"]
    cost = modules["net.block0.fc2"].backward
    assert cost.ops == len(own) == 2
    assert math.isclose(cost.cycles, sum(op.call_cycles for op in own))
    assert cost.temporary_bytes == max(op.temporary_bytes for op in own)
    assert modules["net.block0.fc2"].variable_bytes == 2 * 4 * 64 * 64


def test_grades_of_sums(report):
    modules = report.by_module()
    assert modules["net.block0.fc0"].update.grade == "C"
    assert modules["net.block0.fc0"].setup.grade == "-"
    assert modules[""].forward.without_formula == 1


def test_optimizer_and_accumulation_have_their_names(report):
    purposes = report.by_purpose()
    assert list(purposes) == ["gradient accumulation", "SGD"]
    sgd = sum(op.call_cycles for op in report.ops if op.kind == "sgd_update")
    assert math.isclose(purposes["SGD"].cycles, sgd) and sgd > 0
    assert purposes["gradient accumulation"].ops == 4


def test_memory_and_runs(report):
    assert [one.ipu for one in report.memory] == [0, 1]
    first = report.memory[0]
    assert first.tiles[first.worst_tile] == first.peak == max(first.tiles)
    assert first.peak_op in {op.name for op in report.ops if op.ipu == 0}
    assert max(worst for _, worst, _ in first.liveness) == first.peak
    assert [run.number for run in report.runs] == [0, 1]
    assert report.runs[0].simulated_cycles == report.estimate["call"]["cycles"]


def test_the_text_has_every_part(report, capsys):
    text = str(report)
    for part in (
        "program:",
        "4 x Mk2 GC200, 64 tiles each",
        "192 = 8 x 4 micro-batches per update x 3 device iterations x 2 replicas",
        "11 of 12 published figures within tolerance, worst V4 by 11 %",
        "7, 2 recorded",
        "500 ms for call 1; not the time of an IPU",
        "SGD (4 ops, grade C)",
        "No formula, counted as no time: custom (1)",
        "(simulated)",
    ):
        assert part in text
    report.print_operations()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Simulated cycles of a call, by module and phase"
    assert [line.split()[-1] for line in lines[2:9]] == [
        *("(all)", "net", "block0", "fc0", "fc1", "fc2", "fc3")
    ]


def test_simulated_figures_have_two_digits(report):
    """No line of the summary with a simulated time or cycles has a third digit."""
    for name, text in report._figures().items():
        if name.startswith("simulated") and name != "simulated memory":
            number = text.split()[0]
            assert len(number.replace(".", "").lstrip("0")) <= 2, text


def test_inference_has_no_update(report):
    found = Report(make_report(training=False))
    assert found.by_purpose() == {} and found.by_module()[""].update.cycles == 0
    assert "192 = 8" not in str(found) and "8 x 3 device iterations x 2 replicas" in str(found)


def test_insights_are_the_largest(report):
    found = {
        about: [one for one in report.insights if one.about == about]
        for about in ("tensor", "stage", "op")
    }
    assert [len(one) for one in found.values()] == [5, 2, 5]
    cycles = sorted((op.call_cycles for op in report.ops), reverse=True)
    names = [next(op.name for op in report.ops if op.call_cycles == one) for one in cycles[:5]]
    assert [one.name for one in found["op"]] == names
    assert all(
        one.advice.endswith(".") and one.effect.endswith("(simulated)") for one in report.insights
    )


def test_the_advice_fits_the_tensor():
    data = make_report()
    variables = data["estimate"]["variables"]
    stash = next(one for one in variables if one["class"] == "stash")
    stash["bytes"] = 10**9
    state = {**variables[2], "name": "Accl", "class": "state", "bytes": 10**8, "first_op": None}
    variables.append(state)
    first, second, *_ = Report(data).insights
    assert first.name == stash["name"] and "recomputationCheckpoint" in first.advice
    assert "3 copies" in first.figure and "more in a call" in first.effect
    assert second.name == "Accl" and "useReplicatedTensorSharding" in second.advice


def test_a_program_with_one_stage_gets_advice_on_its_largest_part():
    data = make_report(stages=1)
    call = data["estimate"]["call"]
    call["parts"].update(update=0.5 * call["cycles"], all_reduce=0.0)
    (stage,) = (one for one in Report(data).insights if one.about == "stage")
    assert "gradient accumulation (8)" in stage.advice
    assert stage.effect == "25 % less time for an item (simulated)"


def test_a_program_without_formulas_gets_no_advice_on_time():
    data = make_report()
    for op in data["estimate"]["ops"]:
        for name in ("cycles", "compute", "exchange", "sync", "glue"):
            op[name] = 0.0
        op["formula"] = op["grade"] = ""
    report = Report(data)
    assert {one.about for one in report.insights} == {"tensor"}
    assert "matmul (8)" in str(report) and "(all)" in str(report)


def test_the_order_of_a_tree():
    assert tree(["", "b", "b.x", "a", "b.y", "a.x.z", "a.x"]) == [
        *("", "b", "b.x", "b.y", "a", "a.x", "a.x.z")
    ]


def test_a_comparison(report):
    other = Report(make_report(iterations=1, seed=1))
    comparison = report.compare(other)
    figures = {one.name: one for one in comparison.figures()}
    calls = [one.estimate["call"]["cycles"] for one in (report, other)]
    assert figures["cycles of a call"].first == calls[0]
    assert figures["cycles of a call"].ratio == pytest.approx(calls[1] / calls[0])
    assert figures["device iterations in a call"].first_text == "3"
    assert not figures["device iterations in a call"].simulated
    assert [one.simulated for one in comparison.figures()] == sorted(
        (one.simulated for one in comparison.figures()), reverse=True
    )
    modules = {one.name: one for one in comparison.modules()}
    assert modules["(all)"].second == other.by_module()[""].cycles
    ops = comparison.ops()
    changes = [abs((one.second or 0) - (one.first or 0)) for one in ops]
    assert changes == sorted(changes, reverse=True) and len(ops) == len(report.ops)
    text = str(comparison)
    assert "not simulated" in text and "x 0.3" in text


def test_a_comparison_with_itself_is_equal(report):
    assert {one.change for one in report.compare(report).figures()} <= {"equal", ""}


def test_ops_that_only_one_report_has(report):
    other = Report(make_report(layers=5))
    found = {one.name: one for one in report.compare(other).ops()}
    alone = found["net.block1.fc4/Gemm:0 (forward)"]
    assert alone.first is None and alone.first_text == "-" and alone.change == ""


def test_labels_of_reports(tmp_path):
    timed = "with_feeds/popsim_report__2026-11-26__23-56-17.079__4041"
    for name in ("with_feeds/training", "without_feeds/training", "a/one", "a/two", timed):
        (tmp_path / name).mkdir(parents=True)

    def labels(first, second):
        both = [Report(make_report(), tmp_path / name) for name in (first, second)]
        return both[0].compare(both[1]).labels

    assert labels("with_feeds/training", "without_feeds/training") == (
        "with_feeds",
        "without_feeds",
    )
    assert labels(timed, "without_feeds/training") == ("with_feeds", "without_feeds")
    assert labels(timed, "with_feeds/training")[1] == "training"
    assert labels("a/one", "a/two") == ("one", "two")
    assert labels("a/one", "a/one") == ("one", "one")


def test_notes_of_the_program(tmp_path):
    folder = tmp_path / "reports" / "training"
    path = poptorch.report.annotate(folder, {"seed": 3, "why": ["a", None]})
    assert json.loads(path.read_text()) == {"seed": 3, "why": ["a", None]}
    assert Report(make_report(), folder).app == {"seed": 3, "why": ["a", None]}
    path.write_text("[1")
    assert Report(make_report(), folder).app == {}
    for wrong in ([1], {"a": object()}, {"a": math.nan}):
        with pytest.raises(TypeError, match=r"report\.annotate"):
            poptorch.report.annotate(folder, wrong)
