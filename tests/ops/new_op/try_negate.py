"""Uses the op ``negate`` of a library that was built with it."""

import torch

import popsim_torch
from popsim_torch import _native
from popsim_torch.passes.op_table import op_table
from popsim_torch.reference.call import op
from tests.ops.derived import derived_sample
from tests.ops.one_op import OneOp
from tests.ops.test_thread_invariance import assert_invariant


@op
def negate(call, x):
    """Return the negative."""
    return -x


x = torch.randn(3, 50_000)
(result,) = OneOp("negate", [x], [(torch.float32, x.shape)], {}).run()
assert torch.equal(result, -x)

# What walks the table has met it: facts, samples, checks.
assert op_table()["negate"].family == "layout"
sample = derived_sample(op_table()["negate"])
for dtype in sample.dtypes:
    assert_invariant(lambda dtype=dtype: sample.compile(dtype).run, [(1, 1), (2, 2)])
try:
    OneOp("negate", [x.T], [(torch.float32, x.T.shape)], {})
except popsim_torch.Error as error:
    assert "negate" in str(error) and "contiguous" in str(error), error
else:
    raise AssertionError("an operand that lies otherwise was taken")
print(_native.__name__, "ran negate")
