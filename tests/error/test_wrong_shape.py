"""A later call with a tensor of another shape."""

import pytest
import torch

import popsim_torch as poptorch


@pytest.mark.parametrize("shape", [(4, 4), (12, 4), (6, 5), (6, 4, 1), (24,)], ids=str)
def test_inference(h, shape):
    model = poptorch.inferenceModel(h.Net(), h.make_options())
    x, _ = h.good_batch()
    expected = model(x)
    with pytest.raises(poptorch.Error) as caught:
        model(torch.randn(shape))
    text = str(caught.value)
    assert "Shape mismatch for x: " in text
    assert "expected torch.Size([6, 4]) but got " in text
    assert str(torch.Size(shape)) in text
    assert "destroy()" in text
    assert torch.equal(model(x), expected)


def test_training(h):
    model = h.train(h.Net())
    x, y = h.good_batch()
    model(x, y)
    before = {k: v.clone() for k, v in model.model.state_dict().items()}
    with pytest.raises(poptorch.Error, match="Shape mismatch for "):
        model(x, y[:5])
    for name, value in model.model.state_dict().items():
        assert torch.equal(value, before[name])
    h.check_training(model)


def test_destroy_allows_another_shape(h):
    model = poptorch.inferenceModel(h.Net(), h.make_options())
    model(h.good_batch(6)[0])
    x, _ = h.good_batch(10)
    with pytest.raises(poptorch.Error, match="Shape mismatch for "):
        model(x)
    model.destroy()
    torch.testing.assert_close(model(x), model.model(x).detach(), rtol=1e-5, atol=1e-6)
