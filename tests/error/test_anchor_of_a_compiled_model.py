"""An anchor that is registered in the options of a model that is compiled already."""

import copy

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch import OutputMode


def test_it_is_refused_and_a_compilation_later_takes_it(h):
    x = h.good_batch(6)[0]
    model = poptorch.inferenceModel(h.Net(), h.make_options())
    model(x)
    with pytest.raises(AttributeError) as caught:
        model.options.anchorTensor("it", "input")
    text = str(caught.value)
    assert "Options.anchorTensor('it', 'input'): these are the options of a model that is" in text
    assert "model.destroy() first" in text
    assert not model.options.anchored_tensors
    model.destroy()
    model.options.anchorTensor("it", "input", OutputMode.All)
    model(x)
    assert torch.equal(model.getAnchoredTensor("it"), x)


def test_it_acts_before_the_model_is_compiled(h):
    x = h.good_batch(6)[0]
    model = poptorch.inferenceModel(h.Net(), h.make_options())
    model.options.anchorTensor("it", "input", OutputMode.All)
    model(x)
    assert torch.equal(model.getAnchoredTensor("it"), x)


def test_the_options_it_was_wrapped_with_refuse_it_and_copies_take_it(h):
    options = h.make_options()
    model = poptorch.inferenceModel(h.Net(), options)
    model(h.good_batch(6)[0])
    with pytest.raises(AttributeError, match="wrapped with these options") as caught:
        options.anchorTensor("it", "input")
    assert "options.clone()" in str(caught.value)
    assert not options.anchored_tensors
    copied = options.clone()
    copied.anchorTensor("it", "input", OutputMode.All)
    again = model.options.clone()
    again.anchorTensor("it", "input", OutputMode.All)
    other = copy.deepcopy(model)
    other.options.anchorTensor("it", "input", OutputMode.All)
    x = h.good_batch(6)[0]
    others = [poptorch.inferenceModel(h.Net(), each) for each in (copied, again)]
    for one in (other, *others):
        one(x)
        assert torch.equal(one.getAnchoredTensor("it"), x)


def test_a_model_that_could_not_be_compiled_takes_it(h):
    model = poptorch.inferenceModel(h.Net(), h.make_options())
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        model(torch.zeros(6, 1))
    model.options.anchorTensor("it", "input")


def test_options_of_a_data_loader_take_it(h):
    options = h.make_options()
    poptorch.DataLoader(options, torch.utils.data.TensorDataset(torch.zeros(6, 4)), batch_size=6)
    options.anchorTensor("it", "input", OutputMode.All)
    x = h.good_batch(6)[0]
    model = poptorch.inferenceModel(h.Net(), options)
    model(x)
    assert torch.equal(model.getAnchoredTensor("it"), x)
