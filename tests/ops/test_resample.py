"""Interpolation in models and as ops, against eager PyTorch."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from tests.ops.one_op import LAYOUTS, run_op
from tests.options import make_options

SHAPES = {1: (2, 3, 11), 2: (2, 3, 7, 11), 3: (2, 2, 5, 4, 7)}
TARGETS = {
    "twice": {"scale_factor": 2},
    "by 0.6": {"scale_factor": 0.6},
    "by 1.7": {"scale_factor": 1.7, "recompute_scale_factor": True},
    "to 13": {"size": 13},
    "to 1": {"size": 1},
}
MODES = [
    *((mode, axes, {}) for mode in ("nearest", "nearest-exact") for axes in SHAPES),
    *(
        (mode, axes, {"align_corners": corners})
        for mode, axes in (("linear", 1), ("bilinear", 2), ("trilinear", 3), ("bicubic", 2))
        for corners in (False, True)
    ),
    *((mode, 2, {"antialias": True}) for mode in ("bilinear", "bicubic")),
]


class Interpolated(nn.Module):
    def __init__(self, shape, dtype=torch.float32, **settings):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.x = nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        self._settings = settings

    def forward(self, factor):
        y = F.interpolate(self.x * factor, **self._settings)
        weights = torch.arange(float(y.numel())).reshape(y.shape).sin().to(y.dtype)
        return y, poptorch.identity_loss((y * weights).float().sum(), "none")


def train(module):
    """Return result and gradient, on the device and in eager float64."""
    options = make_options()
    options.anchorTensor("gradient", "Gradient___x")
    eager = Interpolated(module.x.shape, torch.float64, **module._settings)
    eager.x = nn.Parameter(module.x.detach().double())
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.0))
    y, _ = model(torch.ones(1, dtype=module.x.dtype))
    program = str(model.program())
    # PyTorch traces the nearest elements as lookups.
    assert "resample(" in program or "take_grid(" in program
    assert "resample_grad(" in program and "upsample" not in program
    expected, loss = eager(torch.ones(1))
    loss.backward()
    ours = (y.double(), model.getAnchoredTensor("gradient").double())
    return ours, (expected.detach(), eager.x.grad)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize(("mode", "axes", "settings"), MODES, ids=str)
def test_training(mode, axes, settings, target):
    ours, expected = train(Interpolated(SHAPES[axes], mode=mode, **settings, **target))
    torch.testing.assert_close(ours, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_half_precision_computes_in_float32(mode):
    module = Interpolated(SHAPES[2], torch.float16, mode=mode, size=(13, 5))
    ours, expected = train(module)
    torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("size", [(40, 66), (20, 33), (10, 17), (23, 90)])
def test_nearest_moves_the_same_numbers(size, layout):
    x = layout(torch.randn(2, 3, 20, 33))
    x[0, 0, 3, 4] = torch.inf
    x[1, 2, 5, 6] = torch.nan
    expected = F.interpolate(x, size=size)
    settings = {"size": [*size], "scales": [0.0, 0.0], "mode": "nearest"}
    (y,) = run_op("resample", [x], [(x.dtype, expected.shape)], **settings)
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)


def test_an_infinity_stays_in_its_neighbourhood():
    x = torch.zeros(1, 1, 8, 8)
    x[0, 0, 3, 3] = torch.inf
    settings = {"size": [16, 16], "scales": [0.0, 0.0], "mode": "linear"}
    (y,) = run_op("resample", [x], [(x.dtype, (1, 1, 16, 16))], **settings)
    assert y[0, 0, :5].isfinite().all() and y[0, 0, 9:].isfinite().all()
    settings["input_size"] = settings.pop("size")
    (grad,) = run_op("resample_grad", [x], [(x.dtype, (1, 1, 16, 16))], **settings)
    assert grad[0, 0, :4].isfinite().all() and grad[0, 0, 9:].isfinite().all()


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"size": [4], "scales": [0.0]}, "a batch, channels, and 1 to 3 more axes"),
        ({"size": [4, 4], "scales": [0.0]}, "'scales' has a number for each"),
        ({"size": [4, 0], "scales": [0.0, 0.0]}, "attribute 'size' allows the values"),
        ({"size": [4, 1 << 40], "scales": [0.0, 0.0]}, "than 32 bits can count"),
        ({"size": [4, 4], "scales": [0.0, 0.0], "antialias": True}, "only linear and cubic"),
    ],
)
def test_wrong_attributes(attributes, message):
    x = torch.zeros(1, 1, 3, 3)
    with pytest.raises(InternalError, match=message):
        run_op("resample", [x], [(x.dtype, (1, 1, 4, 4))], mode="nearest", **attributes)


@pytest.mark.parametrize("scale", [1e-30, 1e30, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("mode", ["nearest", "nearest_exact", "linear", "cubic"])
def test_absurd_scales_read_only_the_input(mode, scale):
    x = torch.ones(1, 1, 3, 3)
    settings = {"scales": [scale, scale], "mode": mode}
    run_op("resample", [x], [(x.dtype, (1, 1, 5, 5))], size=[5, 5], has_reference=False, **settings)
    if mode in ("linear", "cubic"):
        settings["antialias"] = True
        run_op(
            *("resample", [x], [(x.dtype, (1, 1, 5, 5))]),
            size=[5, 5],
            has_reference=False,
            **settings,
        )


def test_whole_numbers_are_left_to_pytorch():
    class Module(nn.Module):
        def forward(self, x):
            return F.interpolate(x, scale_factor=2)

    x = torch.arange(24, dtype=torch.uint8).reshape(1, 2, 3, 4)
    model = poptorch.inferenceModel(Module(), make_options())
    assert torch.equal(model(x), Module()(x))
