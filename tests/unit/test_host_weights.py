"""Tests of ``host_weights``: a wrapped model shows current weights when they are read."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest
import torch
from torch import nn

from popsim_torch.errors import UsageRuntimeError
from popsim_torch.executor import host_weights
from popsim_torch.executor.host_weights import plain, without_sync, wrap
from tests.unit.wrapped_model import Device, Net, all_tensors


@pytest.fixture
def model():
    return Net()


@pytest.fixture
def device(model):
    return Device(model)


# --- Classes -----------------------------------------------------------------


def test_class_of_the_model_is_a_named_subclass(model, device):
    assert type(model).__name__ == "PoptorchNet"
    assert isinstance(model, Net)


def test_wrapped_parameters_are_parameters_of_another_class(model, device):
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())
    assert all(type(p) is not nn.Parameter for p in model.parameters())


def test_wrapped_buffers_are_tensors_of_another_class(model, device):
    assert all(isinstance(b, torch.Tensor) for b in model.buffers())
    assert all(type(b) is not torch.Tensor for b in model.buffers())


def test_wrapping_keeps_every_tensor_object():
    model = Net()
    before = [id(t) for t in all_tensors(model)]
    Device(model)
    assert [id(t) for t in all_tensors(model)] == before


def test_wrapping_twice_is_refused(model, device):
    with pytest.raises(UsageRuntimeError, match=r"Net is already wrapped.*destroy"):
        wrap(model, device.sync, device.destroy)


def test_is_wrapped_tells(model, device):
    assert host_weights.is_wrapped(model)
    assert not host_weights.is_wrapped(Net())
    assert not host_weights.is_wrapped(model.layer)


def test_undoing_restores_every_class(model, device):
    device.wrapping.undo()
    assert type(model) is Net
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert all(type(b) is torch.Tensor for b in model.buffers())


def test_undoing_twice_does_nothing(model, device):
    device.wrapping.undo()
    device.wrapping.undo()
    assert type(model) is Net


def test_undoing_copies_nothing(model, device):
    device.train(5.0)
    device.wrapping.undo()
    assert device.num_copies == 0


def test_unwrapped_model_can_be_wrapped_again(model, device):
    device.wrapping.undo()
    other = Device(model)
    other.train(2.0)
    assert model.scale[0] == 2.0


def test_own_parameter_class_is_restored():
    class Marked(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = Marked(torch.zeros(2, 2))
    device = Device(model)
    assert isinstance(model.weight, Marked) and type(model.weight) is not Marked
    device.wrapping.undo()
    assert type(model.weight) is Marked


def test_hooks_of_the_user_class_do_not_see_the_subclass():
    seen = []

    class Registering(nn.Module):
        def __init_subclass__(cls):
            seen.append(cls.__name__)

    class Child(Registering):
        pass

    model = Child()
    Device(model)
    assert seen == ["Child"]


def test_failed_wrap_leaves_the_model_as_it_was(monkeypatch):
    model = Net()
    monkeypatch.setattr(host_weights, "is_lazy", lambda tensor: 1 / (tensor.shape != (2, 3)))
    with pytest.raises(ZeroDivisionError):
        wrap(model, lambda: False, lambda: None)
    assert type(model) is Net
    assert all(type(t) in (nn.Parameter, torch.Tensor) for t in all_tensors(model))


def test_lazy_parameters_are_left_alone():
    model = nn.Sequential(nn.LazyLinear(2))
    wrap(model, lambda: False, lambda: None)
    assert type(model[0].weight) is nn.UninitializedParameter


# --- Reads that copy -----------------------------------------------------------

READS = {
    "operation": lambda m: m.scale * 2,
    "torch function": lambda m: torch.equal(m.scale, torch.ones(2)),
    "list of tensors": lambda m: torch.stack([m.scale, m.offset]),
    "data": lambda m: m.scale.data,
    "detach": lambda m: m.scale.detach(),
    "numpy": lambda m: m.offset.numpy(),
    "asarray": lambda m: numpy.asarray(m.offset),
    "tolist": lambda m: m.scale.tolist(),
    "item": lambda m: m.scale.sum().item(),
    "index": lambda m: m.scale[0],
    "iterate": lambda m: list(m.scale),
    "print a parameter": lambda m: repr(m.scale),
    "format": lambda m: f"{m.offset}",
    "print a buffer": lambda m: str(m.offset),
    "inner parameter": lambda m: m.layer.weight.sum(),
    "inner state dict": lambda m: m.layer.state_dict(),
    "state dict": lambda m: m.state_dict(),
    "parameters": lambda m: m.parameters(),
    "named parameters": lambda m: m.named_parameters(),
    "buffers": lambda m: m.buffers(),
    "call": lambda m: m(torch.zeros(4, 3)),
    "forward": lambda m: m.forward(torch.zeros(4, 3)),
    "call of a layer": lambda m: m.layer(torch.zeros(4, 3)),
    "storage": lambda m: m.scale.untyped_storage(),
    "dlpack": lambda m: torch.from_dlpack(m.offset),
    "deepcopy": lambda m: copy.deepcopy(m.scale),
    "pickle": lambda m: pickle.dumps(m.scale),
    "deepcopy of the model": copy.deepcopy,
    "pickle of the model": pickle.dumps,
    "in-place write": lambda m: m.offset.add_(1.0),
    "write of data": lambda m: setattr(m.scale, "data", torch.zeros(2)),
    "half": lambda m: m.half(),
    "request": lambda m: m.copyWeightsToHostIfNeeded(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_read_copies_once(model, device, read):
    device.train(3.0)
    read(model)
    read(model)
    assert device.num_copies == 1


METADATA = {
    "shape": lambda p: p.shape,
    "size": lambda p: p.size(),
    "dim": lambda p: p.dim(),
    "ndim": lambda p: p.ndim,
    "numel": lambda p: p.numel(),
    "len": len,
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "layout": lambda p: p.layout,
    "stride": lambda p: p.stride(),
    "requires_grad": lambda p: p.requires_grad,
    "freeze": lambda p: p.requires_grad_(False),
    "set requires_grad": lambda p: setattr(p, "requires_grad", False),
    "is_leaf": lambda p: p.is_leaf,
    "grad": lambda p: p.grad,
    "set grad": lambda p: setattr(p, "grad", None),
    "hash": hash,
    "is_contiguous": lambda p: p.is_contiguous(),
    "is_floating_point": lambda p: p.is_floating_point(),
    "torch.is_floating_point": torch.is_floating_point,
    "isinstance": lambda p: isinstance(p, nn.Parameter),
}


@pytest.mark.parametrize("read", METADATA.values(), ids=METADATA)
def test_metadata_copies_nothing(model, device, read):
    device.train(3.0)
    read(model.layer.weight)
    assert device.num_copies == 0


def test_read_sees_the_weights_of_the_device(model, device):
    device.train(3.0)
    assert model.scale.tolist() == [3.0, 3.0]


def test_result_of_a_call_uses_the_weights_of_the_device(model, device):
    device.train(3.0)
    model.eval()
    expected = 3.0 * (12.0 - 3.0) / (3.0 + 1e-5) ** 0.5 * 3.0 + 3.0 * 3.0 + 3.0
    torch.testing.assert_close(model(torch.ones(1, 3)), torch.full((1, 2), expected))


def test_every_training_call_makes_one_more_copy(model, device):
    for value in (1.0, 2.0):
        device.train(value)
        assert model.scale[0] == value
    assert device.num_copies == 2


def test_clean_device_is_not_copied(model, device):
    model.scale.sum()
    assert device.num_copies == 0


def test_user_write_survives_the_next_read(model, device):
    device.train(3.0)
    with torch.no_grad():
        model.scale.fill_(7.0)
    assert model.scale.tolist() == [7.0, 7.0]


def test_read_inside_the_sync_does_not_recurse(model):
    calls = []

    def sync():
        calls.append(model.scale.sum().item())
        return True

    wrap(model, sync, lambda: None)
    model.scale.sum()
    assert len(calls) == 1


def test_failed_sync_is_tried_again(model):
    calls = []

    def sync():
        calls.append(1)
        raise ValueError("device lost")

    wrap(model, sync, lambda: None)
    for _ in range(2):
        with pytest.raises(ValueError, match="device lost"):
            model.scale.sum()
    assert len(calls) == 2


def test_without_sync_reads_the_host_as_it_is(model, device):
    device.train(3.0)
    with without_sync():
        assert model.scale.tolist() == [1.0, 1.0]
    assert device.num_copies == 0


def test_without_sync_ends_with_an_exception(model, device):
    device.train(3.0)
    with pytest.raises(KeyError), without_sync():
        raise KeyError
    assert model.scale[0] == 3.0


def test_plain_copies_nothing(model, device):
    device.train(3.0)
    assert plain(model.scale).tolist() == [1.0, 1.0]
    assert device.num_copies == 0


def test_plain_is_a_detached_tensor_on_the_same_storage(model, device):
    alias = plain(model.scale)
    assert type(alias) is torch.Tensor and not alias.requires_grad
    assert alias.data_ptr() == model.scale.data_ptr()


def test_request_reports_whether_it_copied(model, device):
    device.train(3.0)
    assert model.copyWeightsToHostIfNeeded() is True
    assert model.copyWeightsToHostIfNeeded() is False


# --- Results -----------------------------------------------------------------


@pytest.mark.parametrize(
    "operation", [torch.clone, torch.neg, lambda t: t.data, lambda t: t[0], lambda t: t.view(-1)]
)
@pytest.mark.parametrize("name", ["scale", "offset"])
def test_results_are_plain_tensors(model, device, operation, name):
    assert type(operation(getattr(model, name))) is torch.Tensor


def test_printed_parameter_looks_like_one(device, model):
    assert repr(model.scale) == repr(nn.Parameter(torch.ones(2)))


def test_gradients_reach_wrapped_parameters(model, device):
    (model.scale * 3.0).sum().backward()
    assert model.scale.grad.tolist() == [3.0, 3.0]
    assert type(model.scale.grad) is torch.Tensor


def test_tensor_class_of_an_input_still_decides(model, device):
    class Logged(torch.Tensor):
        pass

    x = torch.ones(2).as_subclass(Logged)
    device.train(3.0)
    result = x * model.scale
    assert type(result) is Logged
    assert result.tolist() == [3.0, 3.0]


def test_own_parameter_class_keeps_its_overrides():
    class Doubling(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.sum:
                return "doubled"
            return torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs)

    model = nn.Linear(2, 2)
    model.weight = Doubling(torch.zeros(2, 2))
    wrap(model, lambda: False, lambda: None)
    assert model.weight.sum() == "doubled"
