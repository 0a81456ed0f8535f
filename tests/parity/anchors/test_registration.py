"""Which anchors may be registered, and when they can be read."""

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.parity.anchors.common import MICRO_BATCH, TOLERANCE, make_batch, make_net, make_options


def test_one_tensor_under_two_names_and_as_an_output():
    options = make_options(2, 1)
    options.outputMode(OutputMode.Final)
    options.anchorTensor("every", "fc2/Gemm:0", OutputMode.All)
    options.anchorTensor("again", "fc2/Gemm:0", OutputMode.All)
    options.anchorTensor("total", "fc2/Gemm:0", OutputMode.Sum)
    net = make_net()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    out, _ = model(*make_batch(2, 1))
    every = model.getAnchoredTensor("every")
    assert torch.equal(every, model.getAnchoredTensor("again"))
    assert torch.equal(every[MICRO_BATCH:], out)
    total = every[:MICRO_BATCH] + every[MICRO_BATCH:]
    torch.testing.assert_close(model.getAnchoredTensor("total"), total, **TOLERANCE)


def test_a_short_name_registered_again_is_replaced():
    options = make_options()
    options.anchorTensor("it", "fc1/Gemm:0")
    options.anchorTensor("it", "fc2/Gemm:0")
    net = make_net()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    out, _ = model(*make_batch(1, 1))
    assert torch.equal(model.getAnchoredTensor("it"), out)


@pytest.mark.parametrize("mode", [OutputMode.All, OutputMode.Sum, OutputMode.EveryN])
def test_without_a_mode_an_anchor_takes_that_of_the_model(mode):
    options = make_options(4, 1)
    options.outputMode(mode, 2)
    options.anchorTensor("it", "fc2/Gemm:0")
    net = make_net()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    out, _ = model(*make_batch(4, 1))
    assert torch.equal(model.getAnchoredTensor("it"), out)


def test_the_default_mode_is_final_for_training_and_all_for_inference():
    options = make_options(3)
    options.anchorTensor("it", "fc1/Gemm:0")
    net = make_net()
    x, y = make_batch(3, 1)
    inference = poptorch.inferenceModel(net, options)
    inference(x, y)
    assert inference.getAnchoredTensor("it").shape == (3 * MICRO_BATCH, 4)
    training = poptorch.trainingModel(net, options)
    training(x, y)
    assert training.getAnchoredTensor("it").shape == (MICRO_BATCH, 4)


def test_an_anchored_tensor_is_a_copy():
    options = make_options()
    options.anchorTensor("w", "fc1.weight")
    net = make_net()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))
    model(*make_batch(1, 1))
    first = model.getAnchoredTensor("w")
    kept = first.clone()
    model(*make_batch(1, 1, seed=5))
    assert torch.equal(first, kept)
    first.zero_()
    assert not torch.equal(model.getAnchoredTensor("w"), first)
