"""A return period that does not divide the device iterations."""

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import OutputMode


@pytest.mark.parametrize("d, period", [(4, 3), (4, 8), (1, 2), (6, 4)])
def test_output_mode(h, d, period):
    net, options = h.Net(), h.make_options(d)
    options.outputMode(OutputMode.EveryN, period)
    model = poptorch.inferenceModel(net, options)
    with pytest.raises(poptorch.Error) as caught:
        model(h.good_batch(24)[0])
    assert f"return period {period} of OutputMode.EveryN does not divide the {d}" in str(
        caught.value
    )
    assert "Options.outputMode" in str(caught.value)
    assert not model.isCompiled()
    h.check_inference(poptorch.inferenceModel(net, h.make_options()))


@pytest.mark.parametrize("period, returned", [(3, [2]), (4, [3]), (2, [1, 3])])
def test_an_anchor_may_have_any_period(h, period, returned):
    options = h.make_options(4)
    options.anchorTensor("it", "input", OutputMode.EveryN, period)
    model = poptorch.inferenceModel(h.Net(), options)
    x = h.good_batch(24)[0]
    model(x)
    every = x.reshape(4, 6, *x.shape[1:])
    assert torch.equal(model.getAnchoredTensor("it"), torch.cat([every[i] for i in returned]))


@pytest.mark.parametrize("period", [0, -1, 1.5, "2", None])
def test_no_period(h, period):
    options = h.make_options(4)
    with pytest.raises(AssertionError, match="output_return_period"):
        options.outputMode(OutputMode.EveryN, period)


def test_an_anchor_that_no_iteration_has_reached_says_when_one_will(h):
    options = h.make_options(4)
    options.anchorTensor("it", "input", OutputMode.EveryN, 10)
    model = poptorch.inferenceModel(h.Net(), options)
    model(h.good_batch(24)[0])
    with pytest.raises(AssertionError) as caught:
        model.getAnchoredTensor("it")
    text = str(caught.value)
    assert "'it' has no value yet" in text
    assert "every 10 device iterations, counted over all calls, and 4 have run" in text
    assert "OutputMode.All" in text


@pytest.mark.parametrize("period", [0, -1, 1.5, "2", None])
def test_no_period_of_an_anchor(h, period):
    options = h.make_options(4)
    with pytest.raises(AssertionError, match="output_return_period"):
        options.anchorTensor("it", "fc.weight", OutputMode.EveryN, period)
