"""Copies between images with their channels last and contiguous ones."""

import pytest
import torch

from tests.ops.images import random, run_image_op, with_channels_last


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 3, 5, 7), (3, 16, 16, 16), (1, 33, 17, 3), (8, 64, 20, 20), (2, 1, 4, 4)], ids=str
)
@pytest.mark.parametrize("source", ["first", "last", "part"])
@pytest.mark.parametrize("last", [False, True], ids=["to_first", "to_last"])
def test_copy(last, source, shape, dtype):
    x = (100 * random(shape, torch.float32)).to(dtype)
    given = {
        "first": x,
        "last": with_channels_last(x),
        "part": torch.cat([x, x], 3)[..., : shape[3]],
    }[source]
    (actual,) = run_image_op("copy", [given], [(dtype, shape)], {}, channels_last=last)
    assert torch.equal(actual, x)
