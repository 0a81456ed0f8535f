"""What a user changes after a model is compiled, or forward changes for its next call, is told."""

import logging
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import popsim_torch as poptorch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        y = self.drop(self.fc(x))
        return y, poptorch.identity_loss(y.pow(2).mean(), reduction="none")


X = torch.ones(6, 4)


def compiled(training, net=None):
    net = net or Net()
    if not training:
        model = poptorch.inferenceModel(net)
    else:
        model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    model(X)
    model(X)
    return net, model


def warnings(caplog, text):
    return [one for one in caplog.records if text in one.getMessage()]


both = pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
writes = {
    "init": lambda net: nn.init.ones_(net.fc.weight),
    "load_state_dict": lambda net: net.load_state_dict(Net().state_dict()),
    "copy_": lambda net: net.fc.bias.detach().copy_(torch.ones(4)),
    "data": lambda net: net.fc.weight.data.mul_(2.0),
    "data of a small tensor": lambda net: net.fc.bias.data.add_(1.0),
    "other data": lambda net: setattr(net.fc.weight, "data", torch.ones(4, 4)),
    "data of another type": lambda net: net.double(),
}


same_values = {
    "data in other memory": lambda net: setattr(net.fc.weight, "data", net.fc.weight.data.clone()),
    "read data": lambda net: net.fc.weight.data.norm(),
    "to": lambda net: net.float().to("cpu"),
    "shared memory": lambda net: net.share_memory(),
}


@both
@pytest.mark.parametrize("change", same_values)
def test_the_same_values_elsewhere_are_not_warned_of(training, change, caplog):
    net, model = compiled(training)
    same_values[change](net)
    model(X)
    assert not warnings(caplog, "changed on the host")
    net.fc.weight.data.mul_(2.0)
    model(X)
    assert len(warnings(caplog, "changed on the host")) == 1


@both
@pytest.mark.parametrize("write", writes)
def test_a_write_to_weights_of_the_host_is_warned_of_once(training, write, caplog):
    net, model = compiled(training)
    assert not warnings(caplog, "changed on the host")
    writes[write](net)
    model(X)
    model(X)
    (record,) = warnings(caplog, "changed on the host")
    assert "copyWeightsToDevice()" in record.getMessage()


@both
def test_what_the_device_has_is_not_warned_of(training, caplog):
    net, model = compiled(training)
    nn.init.ones_(net.fc.weight)
    model.copyWeightsToDevice()
    model.load_state_dict(Net().state_dict())
    net.state_dict()
    net.fc.weight.sum().item()
    model(X)
    model.detachFromDevice()
    nn.init.ones_(net.fc.weight)
    model(X)
    assert not warnings(caplog, "changed on the host")


def test_weights_that_another_program_trains_are_not_warned_of(caplog):
    net, training = compiled(True)
    inference = poptorch.inferenceModel(net)
    for _ in range(3):
        training(X)
        inference(X)
        net.state_dict()
        inference(X)
    assert not warnings(caplog, "changed on the host")


@both
def test_another_mode_is_warned_of(training, caplog):
    net, model = compiled(training)
    net.train(not net.drop.training)
    model(X)
    model(X)
    (record,) = warnings(caplog, "mode now")
    assert "destroy()" in record.getMessage()
    model.destroy()
    model(X)
    assert len(warnings(caplog, "mode now")) == 1


def test_hooks_are_watched(caplog):
    net = Net()
    early = net.fc.register_forward_hook(lambda module, args, output: output * 0)
    _, model = compiled(False, net)
    nn.Linear(2, 2).register_forward_hook(print)  # of another model
    model(X)
    assert not warnings(caplog, "Hooks of")
    early.remove()
    model(X)
    (record,) = warnings(caplog, "Hooks of")
    assert "'fc'" in record.getMessage()


def test_a_new_hook_is_warned_of(caplog):
    net, model = compiled(True)
    net.fc.register_full_backward_hook(lambda module, grad_input, grad_output: None)
    model(X)
    assert len(warnings(caplog, "Hooks of the module 'fc'")) == 1


class Changing(nn.Module):
    def __init__(self, change):
        super().__init__()
        self.change = change
        self.steps, self.average, self.shown = 0, torch.ones(4), None

    def forward(self, x):
        self.change(self, x)
        return x * self.average * (self.steps + 1)


def count(module, x):
    module.steps += 1


def average(module, x):
    module.average = module.average * 0.5 + x.mean(0)


def register(module, x):
    module.register_buffer("late", x.mean(0))


def delay(module, x):
    module.late, module.average = module.average, x.mean(0)


def anew(module, x):
    module.average = x.mean(0)


def move(module, x):
    module.average = module.average.to(x.device)


def show(module, x):
    module.shown = x * 2


class State(Changing):
    """Has forward of its own, whose code is looked at."""

    def __init__(self):
        super().__init__(None)
        self.h, self.number, self.table = None, torch.zeros(1), {}
        self.hidden, self.list, self.cache = (torch.zeros(4), torch.ones(4)), [], None


class Sum(State):
    def forward(self, x):
        self.h = x if self.h is None else self.h + x
        return self.h * 1


class Late(State):
    def forward(self, x):
        if not hasattr(self, "late"):
            self.late = x
        self.late = self.late + x
        return self.late * 1


class InMethod(State):
    def forward(self, x):
        return self.state(x) + 1

    def state(self, x):
        self.shown = x if self.shown is None else self.shown * 0.5 + x
        return self.shown


class HostNumber(State):
    def forward(self, x):
        self.number = self.number + 1
        return x * self.number


class NumberFirst(State):
    def forward(self, x):
        self.steps = self.steps + x.sum()
        return x * self.steps


class Recurrent(State):
    def forward(self, x):
        h, c = self.hidden
        self.hidden = (x.mean(0) + h, x.sum(0) + c)
        return x + h + c


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.previous = None

    def forward(self, x):
        return x if self.previous is None else x + self.previous


class OfAnother(State):
    def __init__(self):
        super().__init__()
        self.inner = Inner()

    def forward(self, x):
        result = self.inner(x)
        self.inner.previous = result.detach()
        return result


CARRIED = [Sum, Late, InMethod, HostNumber, NumberFirst, Recurrent, OfAnother]


class Entry(State):
    def forward(self, x):
        result = x + self.table["h"] if "h" in self.table else x
        self.table["h"] = result.detach()
        return result * 1


class Appending(State):
    def forward(self, x):
        result = x + self.list[-1] if self.list else x
        self.list.append(result.detach())
        return result * 1


FILLED = [Entry, Appending]


class Shown(State):
    def forward(self, x):
        self.h = x * 2
        self.table["h"] = self.h
        self.list.append(self.h)
        return self.h + 1

    def last(self):
        if self.h is None:
            return self.list[-1]
        return self.h


class Cached(State):
    def forward(self, x):
        if self.cache is None:
            self.cache = torch.arange(4.0, device=x.device)
            self.table[4] = torch.ones(4, device=x.device)
        return x * self.cache + self.table[4]


class Larger(State):
    def forward(self, x):
        if self.number.shape[0] < x.shape[1]:
            self.number = torch.arange(float(x.shape[1]))
        return x * self.number


class Anew(State):
    def forward(self, x):
        self.list = []
        self.table.clear()
        self.list.append(x * 2)
        self.table["x"] = x
        self.hidden = (x * 3, x)
        return self.list[0] + self.table["x"] + self.hidden[0]


class Same(State):
    def forward(self, x):
        self.number = self.number.to(torch.float32) * 1
        self.h = self.h
        return x * self.number


MADE_ANEW = [Shown, Cached, Larger, Anew, Same]


@pytest.mark.parametrize(
    "change, text",
    [
        (count, "changes the attribute 'steps' from 0 to 1"),
        (average, "assigns a tensor to the attribute 'average'"),
        (register, "registers buffers: late"),
        (delay, "assigns a tensor to the attribute 'average'"),
        (anew, None),
        (move, None),
        (show, None),
        *((one, "assigns a tensor to the attribute") for one in CARRIED),
        *((one, "puts tensors into the attribute") for one in FILLED),
        *((one, None) for one in MADE_ANEW),
    ],
)
def test_a_change_of_forward_that_ends_with_the_trace(change, text, caplog):
    caplog.set_level(logging.WARNING)
    poptorch.inferenceModel(change() if isinstance(change, type) else Changing(change))(X)
    found = warnings(caplog, "forward")
    assert [text in one.getMessage() for one in found] == ([] if text is None else [True])


@both
@pytest.mark.parametrize(
    "change",
    [
        nn.utils.weight_norm,
        nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    ],
    ids=["weight_norm", "spectral_norm", "prune"],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_hooks_compute_are_not_warned_of(training, change, caplog):
    caplog.set_level(logging.WARNING)
    net = Net()
    change(net.fc)
    compiled(training, net)
    assert warnings(caplog, "forward of Linear") == []


@both
def test_a_module_that_is_moved_to_the_device_in_forward(training, caplog):
    class Moves(Net):
        def forward(self, x):
            self.fc = self.fc.to(x.device)
            return super().forward(x)

    caplog.set_level(logging.WARNING)
    compiled(training, Moves())
    assert warnings(caplog, "forward of") == []


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_call_without_gradients_trains(around):
    net = Net()
    before = net.fc.weight.detach().clone()
    with around():
        compiled(True, net)
    assert not torch.equal(net.fc.weight, before)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_detection_is_warned_of(caplog):
    with torch.autograd.set_detect_anomaly(True):
        compiled(True)
        assert torch.is_anomaly_enabled()
    assert len(warnings(caplog, "Options.watch()")) == 1


@both
def test_a_replaced_module_is_warned_of_once(training, caplog):
    net, model = compiled(training)
    net.drop = nn.Identity()
    model(X)
    model(X)
    (record,) = warnings(caplog, "runs as before")
    assert "The module 'drop' was replaced or removed" in record.getMessage()


@both
def test_an_added_module_is_warned_of(training, caplog):
    net, model = compiled(training)
    net.fc.more = nn.Identity()
    model(X)
    (record,) = warnings(caplog, "runs as before")
    assert "The module 'fc.more' was added" in record.getMessage()


@both
def test_replaced_weights_are_warned_of_until_they_are_copied(training, caplog):
    net, model = compiled(training)
    net.fc.weight = nn.Parameter(torch.ones(4, 4))
    model.copyWeightsToDevice()
    model(X)
    assert not warnings(caplog, "changed on the host")
    net.fc.bias = nn.Parameter(torch.ones(4))
    model(X)
    model(X)
    (record,) = warnings(caplog, "changed on the host")
    assert "'fc.bias'" in record.getMessage()


@both
def test_other_modules_and_equal_weights_are_not_warned_of(training, caplog):
    net, model = compiled(training)
    Net()
    net.fc.weight = nn.Parameter(net.fc.weight.detach().clone())
    model(X)
    assert not warnings(caplog, "runs as before")
    assert not warnings(caplog, "changed on the host")


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.mode, self.unread = 2.0, "double", 1
        self.drop = nn.Dropout(0.0)
        self.shift = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        y = self.drop(x) * self.scale if self.mode == "double" else x
        return y, poptorch.identity_loss((y + self.shift).mean(), reduction="none")


numbers = {
    "number": (lambda net: setattr(net, "scale", 3.0), "'scale' of the model is 3.0 now"),
    "string": (lambda net: setattr(net, "mode", "single"), "'mode' of the model is 'single' now"),
    "tensor": (lambda net: setattr(net, "scale", torch.ones(4)), "'scale' .* is a Tensor now"),
    "none": (lambda net: setattr(net, "mode", None), "'mode' .* is a NoneType now"),
    "deleted": (lambda net: delattr(net, "mode"), "'mode' of the model was deleted"),
    "of a layer": (lambda net: setattr(net.drop, "p", 0.5), "'p' of the module 'drop' is 0.5"),
}


@both
@pytest.mark.parametrize(("change", "text"), numbers.values(), ids=numbers)
def test_another_number_in_an_attribute_is_warned_of_once(training, change, text, caplog):
    net, model = compiled(training, Numbers())
    for _ in range(20):
        model(X)
    assert not warnings(caplog, "runs as before")
    change(net)
    for _ in range(20):
        y, _ = model(X)
    (record,) = warnings(caplog, "runs as before")
    assert re.search(text, record.getMessage())
    assert "inferenceModel or trainingModel once more" in record.getMessage()
    assert torch.equal(y, X * 2)


def test_a_number_that_changed_before_the_compilation_is_warned_of(caplog):
    net = Numbers()
    model = poptorch.inferenceModel(net)
    net.scale = 5.0
    for _ in range(20):
        y, _ = model(X)
    (record,) = warnings(caplog, "runs as before")
    assert "is 5.0 now, and was 2.0" in record.getMessage()
    assert torch.equal(y, X * 2)


@both
def test_what_forward_does_not_read_is_not_warned_of(training, caplog):
    net, model = compiled(training, Numbers())
    net.unread = 2
    net.other = 3
    for _ in range(20):
        model(X)
    assert not warnings(caplog, "runs as before")


def test_the_counter_of_batch_norm_is_no_change_of_forward(caplog):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return poptorch.identity_loss(self.norm(x).square().mean(), reduction="none")

    compiled(True, Normed())
    assert not warnings(caplog, "forward changes")


class WithTable(Net):
    """Reads a host tensor in an attribute, and shows another one."""

    def __init__(self):
        super().__init__()
        self.scale, self.unread = torch.ones(4), torch.ones(4)
        self.fc.table = torch.ones(2, 4).t()

    def forward(self, x, *rest):
        return super().forward(x * self.scale + self.fc.table[:, 0], *rest)


def in_place(net):
    net.scale.mul_(0.5)


def through_data(net):
    net.scale.data[1] = 3


def by_numpy(net):
    net.scale.numpy()[0] = 7


def by_another(net):
    net.scale = torch.zeros(4)


def by_none(net):
    net.scale = None


def in_a_layer(net):
    net.fc.table.fill_(3)


@both
@pytest.mark.parametrize(
    "change, text",
    [
        (in_place, "'scale' changed on the host"),
        (through_data, "'scale' changed on the host"),
        (by_numpy, "'scale' changed on the host"),
        (by_another, "'scale' changed on the host"),
        (by_none, "'scale' changed on the host"),
        (in_a_layer, "'fc.table' changed on the host"),
        (lambda net: net.unread.mul_(2), None),
        (lambda net: setattr(net, "scale", net.scale.clone()), None),
    ],
)
def test_a_host_tensor_that_forward_has_read_changes(training, change, text, caplog):
    caplog.set_level(logging.WARNING)
    net, model = compiled(training, WithTable())
    model(X)
    assert not warnings(caplog, "changed on the host")
    change(net)
    for _ in range(8):  # a call looks at a part
        model(X)
    found = warnings(caplog, "changed on the host")
    assert [text in one.getMessage() for one in found] == ([] if text is None else [True])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale, self.shift = 2.0, torch.zeros(4)

    def forward(self, x):
        y = self.scale * self.fc(x) + self.shift
        return y, poptorch.identity_loss(y.pow(2).mean(), reduction="none")


@both
@pytest.mark.parametrize(("name", "value"), [("scale", 3.0), ("shift", torch.ones(4))])
def test_an_attribute_set_after_the_copy_is_warned_of_once(training, name, value, caplog):
    net = Scaled()
    if training:
        model = poptorch.trainingModel(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    else:
        model = poptorch.inferenceModel(net)
    net.scale = float("2")  # (another object, the same value)
    setattr(net, name, value)
    for _ in range(2):
        model(X)
    (record,) = warnings(caplog, "had copied its attributes")
    assert f"'{name}'" in record.getMessage()


@both
def test_attributes_that_are_the_same_are_not_warned_of(training, caplog):
    net, _ = compiled(training, Scaled())
    net.eval()
    assert not warnings(caplog, "had copied its attributes")
    assert net.scale == 2.0
