"""``within`` ends a run if an element is NaN or out of range, in any layout and dtype."""

import pytest
import torch

from popsim_torch.errors import Error
from tests.ops.num_threads import threads
from tests.ops.one_op import LAYOUTS, run_op

BOUNDS = {"least": 0.0, "most": 1.0, "message": "not a probability"}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1.01, -1e-3])
def test_each_bad_element_is_found(dtype, layout, bad):
    for place in ((0, 0), (3, 6), (40, 129)):
        value = torch.rand(41, 130).to(dtype)
        value[place] = bad
        with pytest.raises(Error, match="not a probability"):
            run_op("within", [LAYOUTS[layout](value)], [], **BOUNDS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bounds_and_numbers_between_them_pass(dtype, layout):
    value = torch.cat([torch.rand(3, 50), torch.tensor([0.0, -0.0, 1.0]).expand(50, 3).T]).to(dtype)
    assert run_op("within", [LAYOUTS[layout](value)], [], **BOUNDS) == []


@pytest.mark.parametrize("place", [0, 150_000, 299_999])
def test_several_threads_look(place):
    value = torch.rand(300_000)
    with threads(2):
        assert run_op("within", [value], [], **BOUNDS) == []
        value[place] = 2.0
        with pytest.raises(Error, match="not a probability"):
            run_op("within", [value], [], **BOUNDS)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_scalars_and_no_elements(shape):
    assert run_op("within", [torch.full(shape, 0.5)], [], **BOUNDS) == []
