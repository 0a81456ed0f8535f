"""Gradient accumulation other than 1 in an inference model's options."""

import pytest

import popsim_torch as poptorch


def test_refused_when_wrapping(h):
    net = h.Net()
    with pytest.raises(poptorch.Error, match=r"gradientAccumulation must be 1, got 4"):
        poptorch.inferenceModel(net, h.make_options(1, 4))
    h.check_inference(poptorch.inferenceModel(net, h.make_options()))


def test_the_options_still_serve_for_training(h):
    net, options = h.Net(), h.make_options(1, 2)
    with pytest.raises(poptorch.Error, match="gradientAccumulation"):
        poptorch.inferenceModel(net, options)
    x, y = h.good_batch()
    out, _ = h.train(net, options)(x, y)
    assert out.shape == (3, 3)
