"""Reading an anchor that holds nothing yet."""

import pytest
import torch

import popsim_torch as poptorch


@pytest.fixture
def model(h):
    options = h.make_options()
    options.anchorTensor("weight", "UpdatedVar___fc.weight")
    return h.train(h.Net(), options)


def check_refused(model):
    with pytest.raises(AssertionError, match="No tensor with name 'weight'") as caught:
        model.getAnchoredTensor("weight")
    assert isinstance(caught.value, poptorch.Error)
    assert "has not run" in str(caught.value)


def test_before_compilation(h, model):
    check_refused(model)
    h.check_training(model)
    assert torch.equal(model.getAnchoredTensor("weight"), model.model.fc.weight)


def test_between_compilation_and_the_first_run(h, model):
    model.compile(*h.good_batch())
    check_refused(model)
    h.check_training(model)
    assert torch.equal(model.getAnchoredTensor("weight"), model.model.fc.weight)


def test_after_destroy(h, model):
    model(*h.good_batch())
    model.destroy()
    check_refused(model)
    h.check_training(model)
    assert torch.equal(model.getAnchoredTensor("weight"), model.model.fc.weight)
