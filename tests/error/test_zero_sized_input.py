"""Tensors without elements."""

import pytest
import torch

import popsim_torch as poptorch


@pytest.mark.parametrize("shape", [(0, 4), (6, 0), (0,)], ids=str)
def test_an_input(h, shape):
    model = poptorch.inferenceModel(h.Net(), h.make_options())
    with pytest.raises(poptorch.Error) as caught:
        model(torch.zeros(shape))
    assert "input x. " in str(caught.value)
    assert f"Got shape {list(shape)}" in str(caught.value)
    assert "Zero-sized tensors are unsupported" in str(caught.value)
    h.check_inference(model)


def test_on_a_later_call(h):
    model = poptorch.inferenceModel(h.Net(), h.make_options())
    x, _ = h.good_batch()
    expected = model(x)
    with pytest.raises(poptorch.Error):
        model(x[:0])
    assert torch.equal(model(x), expected)
