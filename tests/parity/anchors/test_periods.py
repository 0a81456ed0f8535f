"""The periods of ``EveryN``: counted in each call, or from call to call where one is longer."""

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options
from tests.parity.anchors.common import MICRO_BATCH, make_batch, make_net

NAME = "Gradient___fc1.weight"


def trained(d, ga, period, name=NAME, mode=OutputMode.EveryN):
    """Return a training model with an anchor of a period, and one of every micro-batch."""
    net, options = make_net(), make_options(d, ga)
    options.anchorTensor("every", name, OutputMode.All)
    options.anchorTensor("it", name, mode, period)
    return poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))


def test_every_tenth_call_of_one_iteration():
    model, kept = trained(1, 1, 10), None
    for call in range(1, 24):
        model(*make_batch(1, 1, seed=call))
        if call % 10 == 0:
            kept = model.getAnchoredTensor("every")
        if kept is None:
            with pytest.raises(AssertionError, match=rf"every 10 device .* and {call} have run"):
                model.getAnchoredTensor("it")
        else:
            assert torch.equal(model.getAnchoredTensor("it"), kept)
    assert not torch.equal(kept, model.getAnchoredTensor("every"))


@pytest.mark.parametrize("d, ga, period", [(4, 2, 6), (2, 3, 4), (3, 1, 5)])
def test_the_iteration_of_a_call_that_the_period_meets(d, ga, period):
    model, kept = trained(d, ga, period), None
    for call in range(6):
        model(*make_batch(d, ga, seed=call))
        every = model.getAnchoredTensor("every").view(d, ga, 4, 5)
        for i in range(d):
            if (call * d + i + 1) % period == 0:
                kept = every[i].reshape(-1, 5)
        if kept is not None:
            assert torch.equal(model.getAnchoredTensor("it"), kept)
    assert kept is not None


def test_the_micro_batches_of_inference_are_counted_on():
    options = make_options(2)
    options.anchorTensor("it", "input", OutputMode.EveryN, 5)
    model = poptorch.inferenceModel(make_net(), options)
    inputs = [make_batch(2, 1, seed) for seed in range(4)]
    for x, y in inputs:
        model(x, y)
    # The fifth of eight is the first of the third call.
    assert torch.equal(model.getAnchoredTensor("it"), inputs[2][0][:MICRO_BATCH])


def test_updates_and_scalars_have_periods_too():
    model = trained(1, 1, 3, "UpdatedVar___fc1.weight")
    for call in range(1, 5):
        model(*make_batch(1, 1, seed=call))
        if call == 3:
            kept = model.getAnchoredTensor("every")
    assert torch.equal(model.getAnchoredTensor("it"), kept)
    loss = trained(1, 2, 2, "loss/Nll:0")
    for call in range(1, 4):
        loss(*make_batch(1, 2, seed=call))
        if call == 2:
            kept = loss.getAnchoredTensor("every")
    assert loss.getAnchoredTensor("it").shape == (2,)
    assert torch.equal(loss.getAnchoredTensor("it"), kept)


def test_a_call_that_fails_is_not_counted():
    class Fails(torch.nn.Module):
        def forward(self, x, y):
            return torch.log(x[:, 0]).sum() + y.sum()

    options = make_options(1)
    options.Precision.enableFloatingPointExceptions(True)
    options.anchorTensor("it", "input", OutputMode.EveryN, 2)
    model = poptorch.inferenceModel(Fails(), options)
    good = torch.ones(MICRO_BATCH, 5), torch.zeros(MICRO_BATCH)
    model(*good)
    with pytest.raises(poptorch.Error):
        model(torch.zeros(MICRO_BATCH, 5), good[1])
    with pytest.raises(AssertionError, match="not complete"):
        model.getAnchoredTensor("it")
    model(2 * good[0], good[1])
    assert torch.equal(model.getAnchoredTensor("it"), 2 * good[0])


def test_every_n_of_the_model_counts_in_a_call_for_its_anchors():
    options = make_options(4).outputMode(OutputMode.EveryN, 2)
    options.anchorTensor("it", "input")
    model = poptorch.inferenceModel(make_net(), options)
    x, y = make_batch(4, 1)
    model(x, y)
    expected = x.view(4, MICRO_BATCH, 5)[1::2].reshape(-1, 5)
    assert torch.equal(model.getAnchoredTensor("it"), expected)
