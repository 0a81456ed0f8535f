"""Where two runs first differ, and how the difference grows."""

import json
import math

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.observe.record import Record
from popsim_torch.records import RecordedTensor, Run, RunWriter, compare
from popsim_torch.records.equality import ulp_distance
from popsim_torch.records.pairs import pair_tensors
from popsim_torch.records.tensors import FURTHER_OUTPUT, OUTPUT
from popsim_torch.statistics import Counts, Fingerprint, Moments, Sample, Statistics, statistics_of
from tests.unit.records.runs import described, write_run

GEMM = "fc1/Gemm:0"


def runs(folder, change=lambda step, name, tensor: tensor, a=None, **more):
    """Return two runs; the second one has changed values."""
    first = write_run(folder / "a.popsim", **{**more, **(a or {})})
    return Run(first), Run(write_run(folder / "b.popsim", change, **more))


def one_bit(step, name, tensor):
    """Change a bit of one number from step 2 on, and more in what follows."""
    if step == 2 and name == GEMM:
        tensor.view(torch.int32)[0, 0] += 1
    return tensor * (1 + 1e-6 * step) if step > 2 else tensor


def test_equal_runs(tmp_path):
    found = compare(*runs(tmp_path))
    assert repr(found).endswith(": equal)")
    assert found.equal and found.first is None and (found.compared, found.by_value) == (16, 0)
    assert [(one.step, one.compared, one.differing) for one in found.growth] == [
        (step, 4, 0) for step in range(4)
    ]
    assert str(found).endswith("Compared 16 pairs of records in 4 steps: the runs are equal.")


def test_the_first_difference_is_a_bit(tmp_path):
    def change(step, name, tensor):
        if step >= 2 and name in (GEMM, "UpdatedVar___fc1.weight"):
            tensor.view(torch.int32)[0, 0] += 3
        return tensor

    found = compare(*runs(tmp_path, change))
    first = found.first
    assert (first.step, first.micro_batch, first.replica, first.name) == (2, 0, 0, GEMM)
    assert (first.module, first.source, first.reason) == ("fc1", "net.py:7", "the bits differ")
    assert (first.samples.ulp, first.samples.index) == (3, 0)
    assert first.samples.dtype == torch.float32
    assert first.a.fingerprint != first.b.fingerprint and first.a.count == 24
    assert found.differing_first == (GEMM, "UpdatedVar___fc1.weight")
    assert [one.differing for one in found.growth] == [0, 0, 2, 2]
    assert not found.equal
    assert repr(found).endswith("b.popsim': first at step 2, 'fc1/Gemm:0'; in 2 steps)")


def test_the_report(tmp_path):
    found = compare(*runs(tmp_path, one_bit, steps=60))
    lines = str(found).splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 110
    text = str(found)
    assert "60 steps: the runs differ in 58 steps." in text
    assert "First difference: step 2, micro-batch 0, tensor 'fc1/Gemm:0' (float32 (6, 4))" in text
    assert "  module fc1, net.py:7\n  the bits differ\n" in text
    assert "Samples differ by at most 1 ulp of float32." in text
    shown = [
        line.split()[0]
        for line in lines[
            lines.index(next(line for line in lines if line.startswith("How it grows"))) + 1 :
        ]
    ]
    assert shown[0] == "2" and shown[-1] == "59" and len(shown) == 5


def test_growth(tmp_path):
    def change(step, name, tensor):
        return tensor * (1 + 2.0 ** (step - 12)) if name == GEMM else tensor

    found = compare(*runs(tmp_path, change))
    for one in found.growth:
        assert (one.differing, one.compared, one.name) == (1, 4, GEMM)
        assert one.largest == pytest.approx(2.0 ** (one.step - 12), rel=1e-2)


def test_a_tolerance(tmp_path):
    def change(step, name, tensor):
        return tensor * (1 + 1e-3 * (step == 3) + 1e-6)

    a, b = runs(tmp_path, change)
    assert compare(a, b).first.step == 0
    found = compare(a, b, tolerance=1e-4)
    assert (found.first.step, found.first.name) == (3, "input")
    assert "relative difference 0.001" in found.first.reason
    assert found.by_value == found.compared == 16
    assert "Values may differ by 0.0001, relative" in str(found)
    assert compare(a, b, tolerance=0.01).equal


def test_small_numbers_are_measured_by_the_whole_tensor(tmp_path):
    """The mean of a tensor around 0 has no digits of its own."""

    def change(step, name, tensor):
        tensor[0, 0] += 1e-6
        return tensor

    assert compare(*runs(tmp_path, change), tolerance=1e-5).equal


@pytest.mark.parametrize("requests", [(Moments(),), (Sample(24),), (Moments(), Sample(3))])
def test_without_fingerprints_numbers_decide(requests, tmp_path):
    def slightly(step, name, tensor):
        return tensor * (1 + 1e-7) if name == GEMM else tensor

    def much(step, name, tensor):
        return tensor * 1.001 if (step, name) == (1, GEMM) else tensor

    for folder, change, is_equal in (("x", slightly, True), ("y", much, False)):
        found = compare(*runs(tmp_path / folder, change, requests=requests))
        assert found.equal == is_equal and found.by_value == 16
        assert found.notes == (
            "4 tensors compared with the tolerance 1e-05, relative: fingerprints are missing.",
        )
        assert is_equal or (found.first.step, found.first.name) == (1, GEMM)


def test_one_run_without_fingerprints(tmp_path):
    a, b = runs(tmp_path, a={"requests": (Moments(),)})
    assert compare(a, b).equal and compare(a, b).by_value == 16


def test_float16_against_float32(tmp_path):
    a = Run(write_run(tmp_path / "a"))

    def half(step, name, tensor):
        return tensor.half()

    def wrong(step, name, tensor):
        return (tensor * (1.02 if (step, name) == (3, GEMM) else 1)).half()

    half_tensors = {"tensors": described(torch.float16)}
    found = compare(a, Run(write_run(tmp_path / "b", half, **half_tensors)))
    assert found.equal and found.by_value == 16
    note = "4 tensors compared with the tolerance 0.0039, relative: float32 in a, float16 in b."
    assert found.notes == (note,)
    found = compare(a, Run(write_run(tmp_path / "c", wrong, **half_tensors)))
    assert (found.first.step, found.first.name) == (3, GEMM)
    assert found.first.samples.dtype == torch.float16 and found.first.samples.ulp > 5
    assert "float32 (6, 4) and float16 (6, 4)" in str(found)


def test_nan_in_one_run(tmp_path):
    def change(step, name, tensor):
        if step == 1 and name != "input":
            tensor[2, 2] = math.nan
        return tensor

    found = compare(*runs(tmp_path, change), tolerance=0.5)
    assert (found.first.step, found.first.name) == (1, GEMM)
    assert found.first.reason == "0 and 1 NaN"
    assert found.growth[1].largest == math.inf and "NaN or inf" in str(found)
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["growth"][1]["largest"] == "inf"


def test_nan_in_both_runs_is_equal(tmp_path):
    def change(step, name, tensor):
        return torch.full_like(tensor, math.nan)

    a = Run(write_run(tmp_path / "a", change, requests=(Moments(), Sample())))
    b = Run(write_run(tmp_path / "b", change, requests=(Moments(), Sample())))
    assert compare(a, b).equal


def test_another_number_of_values(tmp_path):
    def change(step, name, tensor):
        return tensor[1:]

    assert compare(*runs(tmp_path, change)).first.reason == "24 values and 20 values"


def test_what_only_one_run_has(tmp_path):
    more = [*described(), RecordedTensor("z")]
    with RunWriter(tmp_path / "b", tensors=more) as writer:
        for step in range(1, 6):
            for name in ("input", "z"):
                found = statistics_of(torch.ones(24), Moments())
                writer.write_records([Record(name, step, 0, 0, found)])
    found = compare(Run(write_run(tmp_path / "a")), Run(tmp_path / "b"))
    assert found.only_in_a == (GEMM, "Gradient___fc1.weight", "UpdatedVar___fc1.weight")
    assert found.only_in_b == ("z",)
    assert (found.steps_only_in_a, found.steps_only_in_b) == (1, 2)
    assert [one.step for one in found.growth] == [1, 2, 3]
    assert "Only in b: 1 tensor: z." in str(found) and "Only in b: 2 steps." in str(found)


def test_nothing_in_common_is_not_equal(tmp_path):
    RunWriter(tmp_path / "b").close()
    found = compare(Run(write_run(tmp_path / "a")), Run(tmp_path / "b"))
    assert not found.equal and found.first is None and found.growth == ()
    assert "Nothing could be compared" in str(found)


def learning(path, described, values):
    """Write a run of one step of described tensors, with the values of some of them."""
    with RunWriter(path, tensors=described) as writer:
        for name, value in values.items():
            found = statistics_of(torch.full((2,), float(value)), Fingerprint())
            writer.write_records([Record(name, 0, 0, 0, found)])
    return Run(path)


def tensors_of(path, op="Gemm"):
    return [
        RecordedTensor("input", (2,), kind="input"),
        RecordedTensor(f"{path}.weight", (2,), kind="weight"),
        RecordedTensor(f"Gradient___{path}.weight", (2,), kind="gradient"),
        RecordedTensor(f"{path.replace('.', '/')}/{op}:0", (2,), kind="activation"),
    ]


def test_runs_that_share_only_inputs_are_not_equal(tmp_path):
    values = {"input": 1, "Gradient___fc.weight": 2}
    a = learning(tmp_path / "a", tensors_of("fc"), values)
    b = learning(tmp_path / "b", tensors_of("fc"), {"input": 1, "fc/Gemm:0": 2})
    found = compare(a, b)
    assert found.compared == 1 and found.first is None and not found.equal
    assert found.missing == ("Only inputs and hyper-parameters were compared: input.",)
    assert repr(found).endswith(": too little compared)")
    assert compare(a, learning(tmp_path / "c", tensors_of("fc"), values)).equal


def test_runs_whose_weights_have_no_counterpart_are_not_equal(tmp_path):
    shared = RecordedTensor("Relu:0", (2,), kind="activation")
    values = {"input": 1, "Relu:0": 2}
    a = learning(tmp_path / "a", [*tensors_of("fc"), shared], values)
    other = [RecordedTensor("norm.scale", (2,), kind="weight"), shared]
    found = compare(a, learning(tmp_path / "b", other, values))
    assert found.compared == 2 and not found.equal
    assert found.missing == (
        "No weight, gradient or updated weight of a has a counterpart in b. a has fc.weight, "
        "Gradient___fc.weight; b has norm.scale. Names may differ in the path before the model, "
        "as in fit, not in the model itself.",
    )
    text = str(found)
    assert "none of them differs, but too little" in text and found.missing[0] in text
    # A run without weights can say no more than its activations do.
    assert compare(a, learning(tmp_path / "c", [shared], values)).equal


def test_runs_with_records_of_other_weights_are_not_equal(tmp_path):
    tensors = [*tensors_of("fc1"), *tensors_of("fc2")[1:]]
    a, b = (
        learning(tmp_path / name, tensors, {"fc1/Gemm:0": 1, f"Gradient___{module}.weight": 2})
        for name, module in (("a", "fc1"), ("b", "fc2"))
    )
    assert compare(a, b).missing == (
        "No weight, gradient or updated weight was compared. a has records of "
        "Gradient___fc1.weight; b has records of Gradient___fc2.weight. Record the same tensors in "
        "the same steps.",
    )


def test_a_weight_of_another_shape_is_a_difference_that_cannot_be_compared(tmp_path):
    wider = [*tensors_of("fc"), RecordedTensor("fc.bias", (3,), torch.float32, kind="weight")]
    other = [*tensors_of("fc"), RecordedTensor("fc.bias", (4,), torch.float32, kind="weight")]
    values = {"input": 1, "fc.weight": 2, "fc.bias": 3}
    found = compare(
        learning(tmp_path / "a", wider, values), learning(tmp_path / "b", other, values)
    )
    assert not found.equal and found.first is None and found.compared == 2
    assert found.missing == (
        "Not compared, because the shape or kind is another one in b: fc.bias (float32 (3,) weight "
        "in a, float32 (4,) weight in b).",
    )
    assert found.only_in_a == found.only_in_b == ("fc.bias",)


def test_the_path_of_the_model_may_differ(tmp_path):
    a = learning(tmp_path / "a", tensors_of("fc"), {"fc/Gemm:0": 1, "fc.weight": 2})
    b = learning(
        tmp_path / "b", tensors_of("model.fc"), {"model/fc/Gemm:0": 1, "model.fc.weight": 2}
    )
    found = compare(a, b)
    assert found.equal and found.compared == 2 and found.only_in_a == found.only_in_b == ()
    assert found.notes == ("Names in b begin with 'model.', those in a do not.",)
    assert compare(b, a).notes == ("Names in a begin with 'model.', those in b do not.",)
    c = learning(tmp_path / "c", tensors_of("m.fc"), {"m/fc/Gemm:0": 1, "m.fc.weight": 3})
    found = compare(b, c)
    assert (found.first.name, found.first.other.name) == ("model.fc.weight", "m.fc.weight")
    assert found.notes == ("Names begin with 'model.' in a, and with 'm.' in b.",)


def test_statistics_with_nothing_in_common(tmp_path):
    found = compare(*runs(tmp_path, requests=(Counts(),)))
    assert found.compared == 0 and not found.equal
    assert "16 pairs of records have no numbers in common" in str(found)


def written(path, *records):
    with RunWriter(path) as writer:
        writer.write_records(records)
    return Run(path)


def test_micro_batches(tmp_path):
    """One record of a step is of all micro-batches; several have a place each."""
    one, other = Statistics(1, 0, 0, fingerprint=1), Statistics(1, 0, 0, fingerprint=2)
    all_of_them = written(tmp_path / "a", Record("x", 0, None, 0, one))
    single = written(tmp_path / "b", Record("x", 0, 0, 0, one))
    assert compare(all_of_them, single).equal
    several = written(tmp_path / "c", Record("x", 0, 0, 0, one), Record("x", 0, 1, 0, other))
    found = compare(all_of_them, several)
    assert found.compared == 0
    assert "3 records have no counterpart of the same micro-batch" in str(found)
    changed = written(tmp_path / "d", Record("x", 0, 0, 0, one), Record("x", 0, 1, 0, one))
    assert compare(several, changed).first.micro_batch == 1


def test_names_of_modules_and_of_results_correspond():
    program = [
        RecordedTensor("conv/Conv:0", (2, 3), module="conv"),
        RecordedTensor("bn/BatchNormalization:0", module="bn"),
        RecordedTensor("bn/BatchNormalization:1", module="bn"),
        RecordedTensor("Relu:0", (2, 3)),
        RecordedTensor("fc/Transpose:0"),
        RecordedTensor("fc/Gemm:0", (2, 4)),
        RecordedTensor("fc/Gemm:0/1", (2, 4)),
        RecordedTensor("loss/Nll:0", ()),
        RecordedTensor("loss/Nll:1", ()),
        RecordedTensor("Gradient___fc/Gemm:0"),
        RecordedTensor("Gradient___fc.weight"),
        RecordedTensor("drop/Mul:0", (9,), module="drop"),
        RecordedTensor("rnn/LSTM:0", (2, 7), module="rnn"),
        RecordedTensor("rnn/Squeeze:0", (1, 7), module="rnn"),
        RecordedTensor("two/Add:0", (), module="two"),
        RecordedTensor("two/Mul:0", (), module="two"),
    ]
    outputs = {"conv": "conv", "bn": "bn", "(model)": "", "fc": "fc", "fc/1": "fc", "loss": "loss"}
    outputs |= {"drop": "drop", "unknown": "unknown", "rnn": "rnn", "two": "two"}
    shapes = {"conv": (2, 3), "fc": (2, 4), "fc/1": (2, 4), "drop": (8,), "(model)": (2, 3)}
    shapes |= {"rnn": (2, 7), "two": ()}
    eager = [
        *(RecordedTensor(n, shapes.get(n), module=m, kind=OUTPUT) for n, m in outputs.items()),
        RecordedTensor("rnn[1]", (1, 7), module="rnn", kind=FURTHER_OUTPUT),
        RecordedTensor("two[1]", (), module="two", kind=FURTHER_OUTPUT),
        RecordedTensor("Gradient___fc"),
        RecordedTensor("Gradient___fc.weight"),
    ]
    a, b = ({one.name: one for one in some} for some in (eager, program))
    expected = {
        "conv": "conv/Conv:0",
        "bn": "bn/BatchNormalization:0",
        "(model)": "Relu:0",
        "fc": "fc/Gemm:0",
        "fc/1": "fc/Gemm:0/1",
        "loss": "loss/Nll:0",
        "rnn": "rnn/LSTM:0",
        "Gradient___fc": "Gradient___fc/Gemm:0",
        "Gradient___fc.weight": "Gradient___fc.weight",
    }
    assert pair_tensors(a, b) == expected
    assert pair_tensors(b, a) == {theirs: ours for ours, theirs in expected.items()}


def test_calls_of_a_module_with_other_shapes_correspond():
    program = [("act/Relu:0", (2, 3)), ("act/Relu:0/1", (2, 5)), ("act/Relu:0/2", (2, 3))]
    eager = [("act", (2, 3)), ("act/1", (2, 5)), ("act/2", (2, 3))]
    a = {name: RecordedTensor(name, shape, module="act", kind=OUTPUT) for name, shape in eager}
    b = {name: RecordedTensor(name, shape, module="act") for name, shape in program}
    expected = {"act": "act/Relu:0", "act/1": "act/Relu:0/1", "act/2": "act/Relu:0/2"}
    assert pair_tensors(a, b) == expected
    assert pair_tensors(b, a) == {theirs: ours for ours, theirs in expected.items()}


@pytest.mark.parametrize("name", ["5", "a/5", ":", "x:", "x:" + "9" * 5000, "x:0/", "\n:1", ""])
def test_any_name_is_paired_with_itself(name):
    tensors = {name: RecordedTensor(name)}
    eager = {"m": RecordedTensor("m", module="m", kind=OUTPUT)}
    assert pair_tensors(tensors, tensors) == {name: name}
    assert set(pair_tensors(tensors, eager)) <= {name}


@pytest.mark.parametrize(
    ("dtype", "a", "b", "distance"),
    [
        (torch.float32, 1.0, 1.0 + 2**-23, 1),
        (torch.float16, 1.0, 1.0 + 2**-10, 1),
        (torch.float32, 0.0, -0.0, 0),
        (torch.float32, 2.0**-149, -(2.0**-149), 2),
        (torch.float64, -1.0, 1.0, 2 * 0x3FF0000000000000),
        (torch.bfloat16, 1.0, 1.0078125, 1),
    ],
)
def test_units_in_the_last_place(dtype, a, b, distance):
    numbers = [torch.tensor([math.nan, 0.0, one], dtype=torch.float64) for one in (a, b)]
    index = 2 if distance else 1
    assert ulp_distance(*numbers, dtype) == (distance, index)


def test_no_units_in_the_last_place():
    nan = torch.tensor([math.nan], dtype=torch.float64)
    assert ulp_distance(nan, nan, torch.float32) is None
    assert ulp_distance(nan + 1, nan[:0], torch.float32) is None
    assert ulp_distance(torch.ones(1), torch.ones(1), torch.int32) is None


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")

    def change(step, name, tensor):
        return tensor / 0 if step == 3 else tensor * (1 + 1e-6 * step)

    found = compare(*runs(tmp_path, change))
    figure = found.plot(tmp_path / "growth.png")
    upper, lower = figure.axes
    assert list(upper.lines[0].get_ydata()) == [0, 4, 4, 4]
    drawn = list(lower.lines[0].get_ydata())
    assert drawn[1] == pytest.approx(1e-6, rel=0.1) and math.isnan(drawn[0])
    assert "from step 3 on" in upper.get_title()
    assert (tmp_path / "growth.png").read_bytes()[:4] == b"\x89PNG"


def test_text_of_a_file_cannot_change_the_terminal(tmp_path):
    record = Record("x\x1b[2J", 0, 0, 0, statistics_of(torch.ones(2), Fingerprint()))
    other = Record("x\x1b[2J", 0, 0, 0, statistics_of(torch.zeros(2), Fingerprint()))
    a, b = written(tmp_path / "a", record), written(tmp_path / "b", other)
    for text in (str(compare(a, b)), str(a)):
        assert "\x1b" not in text and "x\\x1b[2J" in text


def test_mistakes(tmp_path):
    run = Run(write_run(tmp_path / "a"))
    with pytest.raises(UsageTypeError, match=r"is a str. Pass poptorch.Run\(path\)"):
        compare(run, "b.popsim")
    with pytest.raises(UsageTypeError, match="the tolerance '1' is not a number"):
        compare(run, run, tolerance="1")
    for tolerance in (-1.0, math.nan, math.inf):
        with pytest.raises(UsageValueError, match="negative or not finite"):
            poptorch.compare(run, run, tolerance=tolerance)
