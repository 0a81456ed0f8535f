"""The ops group_norm and group_norm_grad, run on the device, against float64 PyTorch."""

import pytest
import torch

from tests.ops.one_op import LAYOUTS, dtype_name, run_op

F32 = torch.float32
# Largest error as a share of the largest value.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [((3, 6, 5, 7), 2), ((2, 4, 33), 4), ((5, 8), 2), ((2, 64, 12, 12), 1)]


def sample(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def channels_last(value):
    return value.transpose(1, -1).contiguous().transpose(1, -1) if value.dim() > 1 else value


def assert_near(actual, expected, dtype):
    bound = TOLERANCES[dtype] * max(1.0, expected.abs().max().item())
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max() <= bound


@pytest.mark.parametrize("with_weight", [True, False], ids=["weight", "plain"])
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), channels_last], ids=[*LAYOUTS, "last"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
@pytest.mark.parametrize(("shape", "groups"), SHAPES, ids=str)
def test_against_float64(shape, groups, dtype, layout, with_weight):
    samples, channels = shape[:2]
    x = layout(sample(shape, dtype, 1) * 3 + 5)
    gradient = layout(sample(shape, dtype, 2))
    weight, bias = (
        layout(sample((channels,), dtype, seed)) if with_weight else None for seed in (3, 4)
    )
    sizes = [samples, channels, x[0, 0].numel(), groups]
    wide = [None if t is None else t.double().contiguous() for t in (x, weight, bias, gradient)]
    expected = torch.native_group_norm(wide[0], wide[1], wide[2], *sizes, 1e-5)
    out, mean, rstd = run_op(
        "group_norm",
        [x, weight, bias],
        [(dtype, shape), (F32, (samples, groups)), (F32, (samples, groups))],
        groups=groups,
        epsilon=1e-5,
    )
    assert_near(out, expected[0], dtype)
    assert_near(mean, expected[1], F32)
    torch.testing.assert_close(rstd.double(), expected[2], rtol=1e-5, atol=0)

    mask = [True, with_weight, with_weight]
    gradients = torch.ops.aten.native_group_norm_backward(
        wide[3], wide[0], expected[1], expected[2], wide[1], *sizes, mask
    )
    ours = run_op(
        "group_norm_grad",
        [gradient, x, mean, rstd, weight],
        [
            (dtype, size) if on else None
            for size, on in zip([shape, *[(channels,)] * 2], mask, strict=True)
        ],
        groups=groups,
    )
    present = [gradient for gradient in gradients if gradient is not None]
    for actual, wanted in zip(ours, present[: len(ours)], strict=True):
        assert_near(actual, wanted, dtype)
