"""The ops cat and into_zeros, run on the device, against PyTorch."""

import pytest
import torch

from tests.ops.one_op import LAYOUTS, dtype_name, run_op

DTYPES = [torch.bool, torch.bfloat16, torch.float32, torch.int64]


def sample(shape, dtype):
    return torch.randint(0, 99, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_cat(axis, dtype, layout):
    parts = []
    for size in (1, 20, 7):
        shape = [5, 18, 33]
        shape[axis] = size
        parts.append(layout(sample(shape, dtype)))
    expected = torch.cat(parts, axis)
    (out,) = run_op("cat", parts, [(dtype, expected.shape)], axis=axis)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize(
    "part",
    [
        lambda x: x[2],
        lambda x: x[:, 3],
        lambda x: x[..., -1],
        lambda x: x[:, 2::3],
        lambda x: x,
        lambda x: x[..., 3:3],
    ],
    ids=["first", "middle", "last", "steps", "whole", "nothing"],
)
def test_into_zeros(part, dtype, layout):
    expected = torch.zeros(4, 11, 21, dtype=dtype)
    view = part(expected)
    x = layout(sample(view.shape, dtype))
    view.copy_(x)
    (out,) = run_op(
        "into_zeros",
        [x],
        [(dtype, (4, 11, 21))],
        shape=[4, 11, 21],
        strides=list(view.stride()),
        offset=view.storage_offset(),
    )
    assert torch.equal(out, expected)
