"""Names of parameters that are shared, unused or tied."""

import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.names.common import (
    Function,
    Mlp,
    batch,
    inference_names_of,
    make_options,
    names_of,
    trained,
)


def test_a_module_called_twice_has_one_set_of_parameters():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = nn.Linear(4, 4)
            self.again = self.l1

        def forward(self, x):
            return poptorch.identity_loss(self.again(self.l1(x)), "sum")

    names = names_of(Shared(), torch.ones(2, 4))
    assert "l1.weight" in names
    assert "again.weight" not in names
    assert sum(name.startswith("UpdatedVar___") for name in names) == 2
    assert {"l1/Gemm:0", "l1/Gemm:0/1"} <= set(names)


def test_a_shared_module_keeps_its_weights_on_the_host():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.l1 = nn.Linear(4, 4)
            self.again = self.l1

        def forward(self, x):
            return self.again(self.l1(x))

    net = Shared()
    before = net.l1.weight
    inference_names_of(net, torch.ones(2, 4))
    assert net.l1.weight is before
    assert net.again is net.l1
    assert type(before) is nn.Parameter


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.out = nn.Linear(4, 4, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return poptorch.identity_loss(self.out(torch.tanh(self.embed(x))), "sum")


def test_a_tied_weight_has_the_first_name():
    net = Tied()
    names = names_of(net, torch.ones(2, 4))
    assert "embed.weight" in names
    assert "Gradient___embed.weight" in names
    assert not any("out.weight" in name for name in names)
    assert net.out.weight is net.embed.weight


def test_the_gradient_of_a_tied_weight_is_the_sum_of_its_uses():
    net = Tied()
    twin = Tied()
    twin.load_state_dict(net.state_dict())
    options = make_options()
    options.anchorTensor("g", "Gradient___embed.weight")
    x = torch.randn(2, 4)
    model = trained(net, x, options=options)
    model(x)
    twin(x).backward()
    expected = twin.embed.weight.grad
    torch.testing.assert_close(model.getAnchoredTensor("g"), expected, rtol=1e-5, atol=1e-6)


def test_unused_parameters_are_absent():
    class Unused(Mlp):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)
            self.register_buffer("note", torch.ones(3))

    net = Unused()
    before = net.spare.weight.detach().clone()
    model = trained(net, *batch())
    assert not any("spare" in name or "note" in name for name in model.getTensorNames())
    model(*batch())
    assert torch.equal(net.spare.weight, before)


def test_a_frozen_parameter_has_neither_gradient_nor_update():
    net = Mlp()
    net.fc1.weight.requires_grad_(False)
    names = names_of(net, *batch())
    assert "fc1.weight" in names
    assert not any("___fc1.weight" in name for name in names)
    assert "Gradient___fc1.bias" in names


def test_a_parameter_behind_detach_is_not_updated():
    class Detached(Mlp):
        def forward(self, x, y):
            x = self.fc2(self.relu(self.fc1(x)).detach())
            return x, self.loss(x, y)

    names = names_of(Detached(), *batch())
    assert "fc1.weight" in names
    assert not any("___fc1" in name for name in names)
    assert "UpdatedVar___fc2.weight" in names


def test_integer_buffers_are_constants():
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("index", torch.tensor([1, 0]))

        def forward(self, x):
            return x[:, self.index]

    names = inference_names_of(Table(), torch.ones(2, 2))
    assert "index" not in names


def test_captured_tensors_are_constants():
    class Captures(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.tensor([1.0, 2.0])
            self.l1 = Function(lambda x: x + torch.tensor([3.0]))

        def forward(self, x):
            return self.l1(x + self.table)

    names = inference_names_of(Captures(), torch.ones(2, 2))
    assert "Constant:0" in names
    assert "l1/Constant:0" in names
