"""The ops layer_norm and layer_norm_grad, run on the device, against float64 PyTorch."""

import pytest
import torch

from tests.ops.one_op import LAYOUTS, OneOp, dtype_name, run_op

F32 = torch.float32
# Largest error as a share of the largest value.
TOLERANCES = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
SHAPES = [((32, 10), 1), ((3, 5, 16), 1), ((2, 3, 5, 7), 3), ((1, 1000), 1), ((301, 257), 1)]
EPSILON = 1e-5


def sample(shape, dtype, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual, expected, dtype):
    bound = TOLERANCES[dtype] * max(1.0, expected.abs().max().item())
    assert actual.dtype == dtype
    assert (actual.double() - expected).abs().max() <= bound


class Case:
    def __init__(self, shape, num_axes, dtype, layout, with_weight=True):
        normalised = shape[-num_axes:]
        self.x = layout(sample(shape, dtype, 1) * 3 + 5)
        self.gradient = layout(sample(shape, dtype, 2))
        self.weight = layout(sample(normalised, dtype, 3)) if with_weight else None
        self.bias = layout(sample(normalised, dtype, 4)) if with_weight else None
        self.axes = num_axes
        wide = [None if t is None else t.double() for t in (self.x, self.weight, self.bias)]
        self.out, self.mean, self.rstd = torch.native_layer_norm(
            wide[0], list(normalised), wide[1], wide[2], EPSILON
        )
        self.expected = torch.ops.aten.native_layer_norm_backward(
            self.gradient.double(),
            wide[0],
            list(normalised),
            self.mean,
            self.rstd,
            wide[1],
            wide[2],
            [True, with_weight, with_weight],
        )


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=dtype_name)
@pytest.mark.parametrize(("shape", "num_axes"), SHAPES, ids=str)
def test_against_float64(shape, num_axes, dtype, layout):
    case = Case(shape, num_axes, dtype, layout)
    out, mean, rstd = run_op(
        "layer_norm",
        [case.x, case.weight, case.bias],
        [(dtype, shape), (F32, case.mean.shape), (F32, case.rstd.shape)],
        axes=case.axes,
        epsilon=EPSILON,
    )
    assert_near(out, case.out, dtype)
    assert_near(mean, case.mean, F32)
    torch.testing.assert_close(rstd.double(), case.rstd, rtol=1e-5, atol=0)
    gradients = run_op(
        "layer_norm_grad",
        [case.gradient, case.x, case.mean.float(), case.rstd.float(), case.weight],
        [(dtype, shape), (dtype, case.weight.shape), (dtype, case.weight.shape)],
        axes=case.axes,
    )
    for actual, expected in zip(gradients, case.expected, strict=True):
        assert_near(actual, expected, dtype)


def test_without_weight():
    case = Case((7, 33), 1, F32, LAYOUTS["contiguous"], with_weight=False)
    (out,) = run_op("layer_norm", [case.x], [(F32, (7, 33)), None, None], axes=1, epsilon=EPSILON)
    assert_near(out, case.out, F32)
    (for_x,) = run_op(
        "layer_norm_grad",
        [case.gradient, case.x, case.mean.float(), case.rstd.float(), None],
        [(F32, (7, 33)), None, None],
        axes=1,
    )
    assert_near(for_x, case.expected[0], F32)


def test_only_the_weights_gradients():
    case = Case((9, 20), 1, F32, LAYOUTS["contiguous"])
    for_weight, for_bias = run_op(
        "layer_norm_grad",
        [case.gradient, case.x, case.mean.float(), case.rstd.float(), case.weight],
        [None, (F32, (20,)), (F32, (20,))],
        axes=1,
    )
    assert_near(for_weight, case.expected[1], F32)
    assert_near(for_bias, case.expected[2], F32)


def test_constant_and_special_rows():
    x = torch.full((4, 19), 2.0)
    x[1, 3] = torch.nan
    x[2, 18] = torch.inf
    (out,) = run_op("layer_norm", [x], [(F32, (4, 19)), None, None], axes=1, epsilon=EPSILON)
    assert torch.equal(out[0], torch.zeros(19))
    assert torch.equal(out[3], torch.zeros(19))
    assert out[1].isnan().all()
    assert out[2].isnan().all()


def test_a_variance_that_overflows_gives_nan():
    x = torch.tensor([[3e30, 6e30, 9e30], [1.0, 2.0, 3.0]])
    types = [(F32, (2, 3)), (F32, (2, 1)), (F32, (2, 1))]
    for out in run_op("layer_norm", [x], types, axes=1, epsilon=EPSILON)[::2]:
        assert out[0].isnan().all()
        assert out[1].isfinite().all()
    assert torch.layer_norm(x, (3,))[0].isnan().all()


def test_the_number_of_threads_changes_nothing():
    case = Case((700, 300), 1, F32, LAYOUTS["contiguous"])
    inputs = [case.gradient, case.x, case.mean.float(), case.rstd.float(), case.weight]
    outputs = [(F32, (700, 300)), (F32, (300,)), (F32, (300,))]
    results = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(OneOp("layer_norm_grad", inputs, outputs, {"axes": 1}).run())
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
