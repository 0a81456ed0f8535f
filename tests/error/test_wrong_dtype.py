"""A later call with a tensor of another dtype."""

import pytest
import torch

import popsim_torch as poptorch


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64], ids=str)
def test_inference(h, dtype):
    model = poptorch.inferenceModel(h.Net(), h.make_options())
    x, _ = h.good_batch()
    expected = model(x)
    with pytest.raises(poptorch.Error) as caught:
        model(x.to(dtype))
    text = str(caught.value)
    assert "Data type mismatch for x: " in text
    assert "torch.float32" in text
    assert str(dtype) in text
    assert "destroy()" in text
    assert torch.equal(model(x), expected)


def test_training(h):
    model = h.train(h.Net())
    x, y = h.good_batch()
    model(x, y)
    with pytest.raises(poptorch.Error, match=r"torch\.int64.*torch\.int32|torch\.int32.*int64"):
        model(x, y.int())
    h.check_training(model)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn], ids=str)
def test_a_type_that_no_device_has(h, dtype):
    model = poptorch.inferenceModel(h.Net(), h.make_options())
    x, _ = h.good_batch()
    with pytest.raises(poptorch.Error, match=f"Input x has dtype {dtype}. Supported are"):
        model(x.to(dtype))
    h.check_inference(model)
