"""``finite`` ends a run if a tensor has NaN or an infinity, in any layout and dtype."""

import pytest
import torch

from popsim_torch.errors import Error
from tests.ops.one_op import LAYOUTS, run_op

CHECK = {"kept": 0, "divisors": 0, "limit": 0.0, "after": False, "late": False}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_each_bad_element_is_found(dtype, layout, bad):
    for place in ((0, 0), (3, 6), (40, 129)):
        value = torch.randn(41, 130).to(dtype)
        value[place] = bad
        with pytest.raises(Error, match="has NaN or an infinity"):
            run_op("finite", [torch.ones(2), LAYOUTS[layout](value)], [], **CHECK)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_numbers_pass(dtype, layout):
    limits = torch.finfo(dtype)
    value = torch.tensor([[limits.max, limits.min, limits.tiny, limits.smallest_normal, 0.0, -0.0]])
    assert run_op("finite", [LAYOUTS[layout](value.to(dtype))], [], **CHECK) == []


def test_kept_tensors_and_divisors_are_not_checked():
    bad = torch.full((3,), torch.nan)
    attributes = {**CHECK, "kept": 1, "divisors": 1}
    assert run_op("finite", [torch.ones(2), bad, bad], [], **attributes) == []


def test_nothing_is_checked_after_an_update_that_could_not_fail():
    assert run_op("finite", [torch.full((3,), torch.nan)], [], **{**CHECK, "after": True}) == []


def test_a_late_check_leaves_the_failure_to_the_next_one():
    assert run_op("finite", [torch.full((3,), torch.nan)], [], **{**CHECK, "late": True}) == []
