"""The benchmarks' times of ops stand beside the ops that took them."""

from benchmarks.common.cases import find_case
from benchmarks.common.contenders import make_training_model
from benchmarks.common.op_times import profile


def test_records_are_those_of_the_program_that_ran():
    case = find_case("MLP 32")
    batches = case.make_batches(1)
    model = make_training_model(case)
    records = profile(model, batches, rounds=1).records
    expected = model.profile(*batches, repeats=1)
    assert [r.op.kind for r in records] == [op.kind for op in expected]
    # Those of the backward pass that have no name of their own go by their forward op there.
    assert all(
        r.op.name == op.name or op.name.startswith("backward of ")
        for r, op in zip(records, expected, strict=True)
    )
