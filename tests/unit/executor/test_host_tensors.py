"""Models whose parameters or buffers changed after they were compiled."""

import logging
import re

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.executor.host_tensors import HostTensors


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        y = self.norm(self.b(self.a(x)))
        return y, poptorch.identity_loss(y.square(), "mean")


def wrap(net, training):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    if not training:
        return poptorch.inferenceModel(net, options)
    return poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.125))


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))


def tie(net):
    net.b.weight = net.a.weight


def delete_parameter(net):
    del net.b.weight


def delete_module(net):
    del net.b


def set_to_none(net):
    net.b.bias = None


def delete_buffer(net):
    del net.norm.running_mean


def another_shape(net):
    net.b = nn.Linear(3, 5)


def as_many_elements(net):
    net.b.weight = nn.Parameter(torch.ones(9))


def data_of_another_shape(net):
    net.b.weight.data = torch.ones(1, 3)


def data_of_as_many_elements(net):
    net.b.weight.data = torch.ones(9)


def buffer_of_another_shape(net):
    net.norm.running_mean = torch.zeros(4)


def without_values(net):
    net.b.weight = nn.Parameter(torch.empty(3, 3, device="meta"))


CHANGES = {
    tie: "'a.weight' and 'b.weight', which were two tensors, are one now",
    delete_parameter: "'b.weight' is not in the model any more",
    delete_module: "'b.weight' is not in the model any more",
    set_to_none: "'b.bias' is not in the model any more",
    delete_buffer: "'norm.running_mean' is not in the model any more",
    another_shape: "'b.weight' has the shape (5, 3), on the device it has (3, 3)",
    as_many_elements: "'b.weight' has the shape (9,), on the device it has (3, 3)",
    data_of_another_shape: "'b.weight' has the shape (1, 3), on the device it has (3, 3)",
    data_of_as_many_elements: "'b.weight' has the shape (9,), on the device it has (3, 3)",
    buffer_of_another_shape: "'norm.running_mean' has the shape (4,), on the device it has (3,)",
    without_values: "'b.weight' is on the device 'meta' and has no values",
}
changes = pytest.mark.parametrize(
    ("change", "text"), CHANGES.items(), ids=lambda value: getattr(value, "__name__", "")
)


@changes
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_the_error_of_an_upload_says_what_changed(change, text, training):
    net = Net()
    model = wrap(net, training)
    before, _ = model(X)
    change(net)
    with pytest.raises(poptorch.Error, match=re.escape(text)) as caught:
        model.copyWeightsToDevice()
    assert "destroy()" in str(caught.value)
    # Nothing was copied: the device still has the old weights.
    if not training:
        assert torch.equal(model(X)[0], before)


@changes
def test_the_error_of_a_download_says_what_changed(change, text):
    net = Net()
    model = wrap(net, True)
    model(X)
    change(net)
    model(X)
    before = net.__dict__["_modules"]["a"]._parameters["weight"]
    with pytest.raises(poptorch.Error, match=re.escape(text)):
        net.state_dict()
    # The weights are still not copied: the next read raises the same error.
    with pytest.raises(poptorch.Error, match=re.escape(text)):
        _ = before.sum()


def test_a_change_that_is_undone():
    net = Net()
    model = wrap(net, True)
    model(X)
    weight = net.b._parameters.pop("weight")
    model(X)
    with pytest.raises(poptorch.Error, match="not in the model any more"):
        model.copyWeightsToHost()
    net.b._parameters["weight"] = weight
    before = weight.detach().clone()
    model(X)
    assert not torch.equal(net.b.weight, before)


@changes
def test_destroy_brings_what_still_fits(change, text, caplog):
    net, twin = Net(), Net()
    twin.load_state_dict(net.state_dict())
    model, reference = wrap(net, True), wrap(twin, True)
    for executor in (model, reference):
        executor(X)
    change(net)
    for executor in (model, reference):
        executor(X)
    caplog.set_level(logging.WARNING, logger="poptorch::python")
    model.destroy()
    assert text in caplog.text
    assert type(net) is Net
    assert torch.equal(net.a.weight, twin.a.weight)
    assert torch.equal(net.norm.running_var, twin.norm.running_var)


def test_the_changed_model_can_be_compiled_anew():
    net = Net()
    model = wrap(net, False)
    model(X)
    net.b = nn.Linear(3, 3)
    net.b.weight = net.a.weight
    model.destroy()
    torch.testing.assert_close(model(X)[0], net(X)[0].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
def test_new_tensors_of_the_same_shape_are_fine(training):
    net = Net()
    model = wrap(net, training)
    model(X)
    net.a.weight.data = torch.ones(3, 3).t()
    net.b = nn.Linear(3, 3)
    model.copyWeightsToDevice()
    expected = net(X)[0].detach()
    torch.testing.assert_close(model(X)[0], expected, rtol=1e-4, atol=1e-5)


def test_tied_weights_that_part():
    net = Net()
    net.b.weight = net.a.weight
    model = wrap(net, False)
    model(X)
    model.copyWeightsToDevice()
    net.b.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(
        poptorch.Error, match=r"'a.weight' and 'b.weight', which were one tensor, are two now"
    ):
        model.copyWeightsToDevice()


def test_an_optimizer_for_a_parameter_that_is_gone():
    net = Net()
    model = wrap(net, True)
    model(X)
    delete_parameter(net)
    with pytest.raises(poptorch.Error, match=r"'b.weight' is not in the model any more"):
        model.setOptimizer(poptorch.optim.SGD(net.a.parameters(), lr=0.5))


def test_a_model_without_values_is_refused_every_time():
    model = wrap(Net().to("meta"), False)
    for _ in range(2):
        with pytest.raises(poptorch.Error, match=r"on the device 'meta': it has no values"):
            model(X)
        assert not model.isCompiled()


def test_an_optimizer_state_of_another_shape_is_refused_every_time():
    net, other = Net(), Net()
    other.a = nn.Linear(3, 1)
    other.b = nn.Linear(1, 3)
    states = []
    for each in (other, net):
        optimizer = poptorch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        options = poptorch.Options()
        options.showCompilationProgressBar(False)
        model = poptorch.trainingModel(each, options, optimizer)
        if each is other:
            model(X)
        states.append(optimizer.state_dict())
    optimizer.load_state_dict({**states[1], "ipu_state": states[0]["ipu_state"], "ipu_param": {}})
    for _ in range(2):
        with pytest.raises(poptorch.Error, match=r"weight' has the shape .*; on the device it has"):
            model(X)


def test_only_some_of_many_problems_are_listed():
    net = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(9)))
    shapes = {name: (2, 2) for name, _ in net.named_parameters()}
    host = HostTensors(net, shapes)
    assert list(host.find(shapes)) == list(shapes)
    for layer in net:
        del layer.weight
    with pytest.raises(poptorch.Error, match=r"'0.weight'.*'2.weight'[^']*; and 6 more\."):
        host.find(shapes)
