"""Wrapping a model for training that is wrapped already."""

import pytest

import popsim_torch as poptorch
from popsim_torch.errors import UsageRuntimeError


def check_refused(h, model):
    with pytest.raises(RuntimeError, match="already been wrapped for training") as caught:
        h.train(model)
    assert isinstance(caught.value, UsageRuntimeError)
    assert "destroy()" in str(caught.value)


def test_the_model(h):
    net = h.Net()
    model = h.train(net)
    check_refused(h, net)
    h.check_training(model)


def test_the_executor(h):
    model = h.train(h.Net())
    model(*h.good_batch())
    with pytest.raises(RuntimeError, match="already been wrapped for training"):
        poptorch.trainingModel(model)
    h.check_training(model)


def test_destroy_of_a_compiled_model_unwraps_it(h):
    net = h.Net()
    model = h.train(net)
    model(*h.good_batch())
    model.destroy()
    h.check_training(h.train(net))


def test_destroy_of_the_model_unwraps_it(h):
    net = h.Net()
    model = h.train(net)
    model(*h.good_batch())
    net.destroy()
    assert not model.isCompiled()
    h.check_training(h.train(net))


def test_a_dropped_executor_does_not_keep_the_model_wrapped(h):
    net = h.Net()
    h.train(net)
    h.check_training(h.train(net))


def test_inference_may_wrap_it_any_number_of_times(h):
    net = h.Net()
    model = h.train(net)
    for wrapped in (net, model, poptorch.inferenceModel(model, h.make_options())):
        h.check_inference(poptorch.inferenceModel(wrapped, h.make_options()))
    h.check_training(model)


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
@pytest.mark.parametrize("thing", [None, 3, "net", {}], ids=str)
def test_what_is_no_model(h, wrap, thing):
    with pytest.raises(poptorch.Error, match=r"model must be a torch\.nn\.Module"):
        wrap(thing)


@pytest.mark.parametrize("wrap", [poptorch.trainingModel, poptorch.inferenceModel])
def test_options_of_a_wrong_type(h, wrap):
    net = h.Net()
    with pytest.raises(poptorch.Error, match=r"options must be a poptorch\.Options, got dict"):
        wrap(net, {})
    h.check_training(h.train(net))
