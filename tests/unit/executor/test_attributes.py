"""An executor's mode, its attributes and those of the user's model."""

import copy
import io

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.executor.nets import Net, batch, infer, train


def test_the_training_flag_of_the_top_level_is_that_of_wrapping():
    class Flag(nn.Module):
        def forward(self, x):
            return x * (2 if self.training else 3)

    net = Flag().train()
    model = infer(net)
    net.eval()
    assert model(torch.ones(1)).tolist() == [2.0]


def test_the_mode_of_sub_modules_is_that_of_compilation():
    class Flag(nn.Module):
        def forward(self, x):
            return x * (2 if self.training else 3)

    net = nn.Sequential(Flag())
    model = infer(net)
    net.eval()
    assert model(torch.ones(1)).tolist() == [3.0]
    net.train()
    assert model(torch.ones(1)).tolist() == [3.0]


def test_plain_attributes_are_constants():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = 2.0
            self.table = torch.tensor([1.0, 10.0])

        def forward(self, x):
            return x * self.factor + self.table

    net = Holder()
    model = infer(net)
    assert model(torch.ones(2)).tolist() == [3.0, 12.0]
    net.factor = 5.0
    net.table.fill_(0)
    assert model(torch.ones(2)).tolist() == [3.0, 12.0]


class Caches(nn.Module):
    """A model that makes a table in its first forward and keeps it, as positional encodings do."""

    def __init__(self):
        super().__init__()
        self.table = None
        self.kept = {}

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(4.0)
        if "scale" not in self.kept:
            self.kept["scale"] = [torch.full((4,), 2.0)]
        return x * self.kept["scale"][0] + self.table


@pytest.mark.parametrize("top", [True, False], ids=["top level", "sub-module"])
def test_a_tensor_cached_by_forward_is_made_anew_by_the_next_trace(top):
    net = Caches() if top else nn.Sequential(Caches())
    first, second = infer(net), infer(net)
    expected = torch.tensor([2.0, 3.0, 4.0, 5.0])
    assert torch.equal(first(torch.ones(1, 4))[0], expected)
    assert torch.equal(second(torch.ones(2, 4))[1], expected)
    first.destroy()
    assert torch.equal(first(torch.ones(3, 4))[2], expected)


@pytest.mark.parametrize("top", [True, False], ids=["top level", "sub-module"])
def test_a_tensor_cached_by_forward_does_not_spoil_the_model(top):
    net = Caches() if top else nn.Sequential(Caches())
    infer(net)(torch.ones(1, 4))
    copy.deepcopy(net)
    torch.save(net, io.BytesIO())
    assert net(torch.ones(1, 4)).tolist() == [[2.0, 3.0, 4.0, 5.0]]


def test_a_table_cached_on_the_host_is_used():
    net = nn.Sequential(Caches())
    expected = net(torch.ones(1, 4))
    assert torch.equal(infer(net)(torch.ones(1, 4)), expected)


def test_attributes_come_from_the_model():
    net = Net()
    net.note = "mine"
    model = infer(net)
    assert model.note == "mine"
    assert model.fc1 is net.fc1
    assert dict(model.named_parameters()).keys() == dict(net.named_parameters()).keys()
    assert not isinstance(model, nn.Module)
    with pytest.raises(AttributeError):
        _ = model.missing


def test_a_training_executor_has_the_users_module():
    net = Net()
    model = train(net)
    assert model.model is net
    model.eval()
    assert not net.training
    assert not net.fc1.training


def test_an_inference_executor_has_a_copy_that_shares_what_is_inside():
    net = Net()
    model = infer(net)
    assert type(model.model) is Net
    assert model.model is not net
    assert model.model.fc1 is net.fc1
    model.eval()
    assert net.training
    assert not model.model.training
    assert not net.fc1.training


def test_the_mode_of_an_inference_executor_is_what_forward_sees():
    class Flag(nn.Module):
        def forward(self, x):
            return x * (2 if self.training else 3)

    model = infer(Flag().train())
    model.eval()
    assert model(torch.ones(1)).tolist() == [3.0]


def test_attributes_are_set_on_the_executor():
    net = Net()
    model = infer(net)
    model.note = "executor"
    assert not hasattr(net, "note")
    assert model.note == "executor"


def test_a_wrapped_model_is_still_its_class():
    net = Net()
    model = train(net)
    assert isinstance(net, Net)
    assert type(net).__name__ == "PoptorchNet"
    assert isinstance(net.fc1.weight, nn.Parameter)
    model.compile(*batch())
    net.destroy()
    assert type(net) is Net


def test_the_representation_shows_blocks():
    net = Net()
    poptorch.BeginBlock(net.fc2, "late", ipu_id=0)
    assert "(fc2): BeginBlock(user_id=late, ipu_id=0) Linear(" in repr(infer(net))
    assert "BeginBlock" not in repr(net)
