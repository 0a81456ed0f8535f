"""Optimizers that the device does not have, or that do not fit the model."""

import pytest
import torch

import popsim_torch as poptorch


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_unsupported_type(h, kind):
    net = h.Net()
    model = None
    with pytest.raises(AssertionError, match="Unsupported optimizer type") as caught:
        model = poptorch.trainingModel(net, h.make_options(), kind(net.parameters()))
        model(*h.good_batch())
    assert isinstance(caught.value, poptorch.Error)
    assert kind.__name__ in str(caught.value)
    del model
    if hasattr(net, "destroy"):
        net.destroy()
    h.check_training(h.train(net))


def test_set_optimizer_refuses_it_and_keeps_the_old_one(h):
    net = h.Net()
    model = h.train(net)
    model(*h.good_batch())
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        model.setOptimizer(torch.optim.LBFGS(net.parameters()))
    h.check_training(model)


def test_set_optimizer_refuses_another_kind_after_compilation(h):
    net = h.Net()
    model = h.train(net)
    model(*h.good_batch())
    with pytest.raises(poptorch.Error):
        model.setOptimizer(poptorch.optim.Adam(net.parameters(), lr=0.1))
    h.check_training(model)


def test_set_optimizer_before_compilation_may_change_the_kind(h):
    net = h.Net()
    model = poptorch.trainingModel(net, h.make_options(), torch.optim.Adam(net.parameters()))
    model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.125))
    h.check_training(model)


def test_no_optimizer_object(h):
    net = h.Net()
    with pytest.raises(AssertionError, match="Unsupported optimizer type"):
        poptorch.trainingModel(net, h.make_options(), "SGD")(*h.good_batch())


def test_set_optimizer_of_an_inference_model(h):
    net = h.Net()
    model = poptorch.inferenceModel(net, h.make_options())
    with pytest.raises(poptorch.Error, match="an inference model has no optimizer"):
        model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.125))
    h.check_inference(model)


def test_parameters_of_another_model(h):
    net, other = h.Net(), h.Net()
    model = poptorch.trainingModel(
        net, h.make_options(), poptorch.optim.SGD(other.parameters(), lr=0.125)
    )
    with pytest.raises(poptorch.Error, match=r"Parameter 0 of optimizer group 0.*not in the model"):
        model(*h.good_batch())
    model.setOptimizer(poptorch.optim.SGD(net.parameters(), lr=0.125))
    h.check_training(model)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_twice(h):
    net = h.Net()
    optimizer = torch.optim.SGD([net.fc.weight, net.fc.weight], lr=0.1)
    with pytest.raises(poptorch.Error, match="SGD has a parameter more than once"):
        poptorch.trainingModel(net, h.make_options(), optimizer)
