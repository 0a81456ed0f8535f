"""A batch that cannot be divided into D x GA micro-batches."""

import pytest
import torch

import popsim_torch as poptorch


def test_training(h):
    model = h.train(h.Net(), h.make_options(2, 3))
    with pytest.raises(AssertionError) as caught:
        model(*h.good_batch(8))
    text = str(caught.value)
    assert isinstance(caught.value, poptorch.Error)
    assert "Input x of shape (8, 4)" in text
    assert "8, is not a multiple of the combined factor F=6" in text
    for part in ("D=2", "GA=3", "R=1"):
        assert part in text
    out, loss = model(*h.good_batch(12))
    assert out.shape == (2, 3)
    assert loss.isfinite()


def test_inference(h):
    model = poptorch.inferenceModel(h.Net(), h.make_options(4))
    with pytest.raises(AssertionError, match=r"6, is not a multiple of .* F=4"):
        model(h.good_batch(6)[0])
    x = h.good_batch(8)[0]
    torch.testing.assert_close(model(x), model.model(x).detach(), rtol=1e-5, atol=1e-6)


def test_compile(h):
    model = poptorch.inferenceModel(h.Net(), h.make_options(4))
    with pytest.raises(AssertionError, match="F=4"):
        model.compile(h.good_batch(6)[0])
    assert not model.isCompiled()
    model.compile(h.good_batch(4)[0])
    assert model.isCompiled()


def test_the_tensor_at_fault_is_named(h):
    model = h.train(h.Net(), h.make_options(2))
    x, y = h.good_batch(4)
    with pytest.raises(AssertionError, match=r"Input y of shape \(3,\)"):
        model(x, y[:3])


def test_a_scalar_input_counts_as_one_sample(h):
    class Scaled(h.Net):
        def forward(self, x, scale):
            return x * scale

    model = poptorch.inferenceModel(Scaled(), h.make_options(2))
    with pytest.raises(AssertionError, match=r"Input scale of shape \(\).*F=2"):
        model(torch.ones(2, 4), torch.tensor(3.0))
    model = poptorch.inferenceModel(Scaled(), h.make_options(1))
    assert torch.equal(model(torch.ones(2, 4), torch.tensor(3.0)), torch.full((2, 4), 3.0))


def test_a_short_last_batch(h):
    model = poptorch.inferenceModel(h.Net(), h.make_options(2))
    x = h.good_batch(8)[0]
    expected = model(x)
    with pytest.raises(poptorch.Error):
        model(x[:6])
    assert torch.equal(model(x), expected)
