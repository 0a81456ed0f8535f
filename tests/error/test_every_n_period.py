"""A return period that does not divide the device iterations."""

import pytest

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


def test_an_anchor(h):
    net, options = h.Net(), h.make_options(4)
    options.anchorTensor("it", "fc.weight", OutputMode.EveryN, 3)
    match = r"anchorTensor\('it'\).*period 3.*4 device iter"
    h.refuse_training(net, options, poptorch.Error, match)
    h.check_training(h.train(net))


@pytest.mark.parametrize("period", [0, -1, 1.5, "2", None])
def test_no_period(h, period):
    options = h.make_options(4)
    with pytest.raises(AssertionError, match="output_return_period"):
        options.outputMode(OutputMode.EveryN, period)


@pytest.mark.parametrize("period", [0, -1, 1.5, "2"])
def test_no_period_of_an_anchor(h, period):
    options = h.make_options(4)
    with pytest.raises(AssertionError, match="output_return_period"):
        options.anchorTensor("it", "fc.weight", OutputMode.EveryN, period)
