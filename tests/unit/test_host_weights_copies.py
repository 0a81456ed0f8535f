"""Tests of ``popsim_torch.executor.host_weights``: saving, copying and dropping a wrapped model."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
import pickletools
import subprocess
import sys
import weakref

import pytest
import torch
from torch import nn

from popsim_torch.executor import host_weights
from popsim_torch.executor.host_weights import plain, wrap
from tests.unit.wrapped_model import Device, Net, all_tensors


@pytest.fixture
def model():
    return Net()


@pytest.fixture
def device(model):
    return Device(model)


# --- Saving ------------------------------------------------------------------


def test_state_dict_is_current(model, device):
    device.train(3.0)
    assert model.state_dict()["layer.bias"].tolist() == [3.0, 3.0]


def test_state_dict_holds_detached_plain_tensors(model, device):
    values = model.state_dict().values()
    assert all(type(v) is torch.Tensor and not v.requires_grad for v in values)


def test_state_dict_looks_like_that_of_the_plain_model(model, device):
    assert list(model.state_dict()) == list(Net().state_dict())
    assert model.state_dict()._metadata == Net().state_dict()._metadata


def test_state_dict_keeps_its_signature(model, device):
    assert inspect.signature(model.state_dict) == inspect.signature(Net().state_dict)


def test_state_dict_takes_torchs_arguments(model, device):
    target = {"old": 1}
    state = model.state_dict(destination=target, prefix="net.", keep_vars=True)
    assert state is target
    assert state["net.scale"] is model.scale


def test_state_dict_of_tied_weights_shares_storage():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    wrap(model, lambda: False, lambda: None)
    state = model.state_dict()
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()


def saved(thing):
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    buffer.seek(0)
    return buffer


def test_saved_state_dict_loads_weights_only(model, device):
    device.train(3.0)
    state = torch.load(saved(model.state_dict()), weights_only=True)
    assert state["scale"].tolist() == [3.0, 3.0]


def test_saved_parameters_load_weights_only(model, device):
    loaded = torch.load(saved(list(model.parameters())), weights_only=True)
    assert all(type(p) is nn.Parameter for p in loaded)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_name_nothing_of_ours(model, device, protocol):
    for thing in (model, model.state_dict(), model.scale, model.offset, model.layer):
        words = [
            argument
            for _, argument, _ in pickletools.genops(pickle.dumps(thing, protocol))
            if isinstance(argument, str)
        ]
        assert not [w for w in words if "popsim" in w.lower() or "poptorch" in w.lower()]


def test_saved_model_loads_without_the_package(tmp_path):
    model = nn.Linear(2, 1)
    device = Device(model)
    device.train(3.0)
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import sys, torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "assert type(model) is torch.nn.Linear\n"
        "assert type(model.weight) is torch.nn.Parameter\n"
        "assert model.weight.tolist() == [[3.0, 3.0]]\n"
        "assert not [name for name in sys.modules if name.startswith('popsim')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=dict(os.environ))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_duplicate_is_unwrapped_and_current(model, device, duplicate):
    device.train(3.0)
    twin = duplicate(model)
    assert type(twin) is Net
    assert all(type(p) is nn.Parameter for p in twin.parameters())
    assert all(type(b) is torch.Tensor for b in twin.buffers())
    assert twin.scale.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_duplicate_keeps_tied_weights(duplicate):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    wrap(model, lambda: False, lambda: None)
    twin = duplicate(model)
    assert twin[1].weight is twin[0].weight


def test_duplicating_leaves_the_model_wrapped(model, device):
    copy.deepcopy(model)
    pickle.dumps(model)
    assert host_weights.is_wrapped(model)
    device.train(3.0)
    assert model.scale[0] == 3.0


def test_failed_pickle_leaves_the_model_wrapped(model, device):
    model.unpicklable = lambda: None
    with pytest.raises((AttributeError, pickle.PicklingError)):
        pickle.dumps(model)
    assert host_weights.is_wrapped(model)


def test_model_with_constructor_arguments_pickles():
    twin = pickle.loads(pickle.dumps(_wrapped(Sized(3))))
    assert type(twin) is Sized and twin.size == 3


class Sized(nn.Module):
    def __new__(cls, size):
        self = super().__new__(cls)
        self.__dict__["size"] = size
        return self

    def __init__(self, size):
        super().__init__()

    def __getnewargs__(self):
        return (self.size,)


def _wrapped(model):
    wrap(model, lambda: False, lambda: None)
    return model


def test_pickled_parameter_is_plain(model, device):
    device.train(3.0)
    twin = pickle.loads(pickle.dumps(model.scale))
    assert type(twin) is nn.Parameter and twin.tolist() == [3.0, 3.0]


def test_pickled_buffer_is_plain(model, device):
    assert type(pickle.loads(pickle.dumps(model.offset))) is torch.Tensor


def test_copied_parameter_shares_storage(model, device):
    twin = copy.copy(model.scale)
    assert type(twin) is nn.Parameter
    assert twin.data_ptr() == model.scale.data_ptr()


# --- Shallow copies ------------------------------------------------------------


def test_shallow_copy_stays_wrapped(model, device):
    twin = copy.copy(model)
    assert type(twin).__name__ == "PoptorchNet"
    assert twin.scale is model.scale
    device.train(3.0)
    assert twin.copyWeightsToHostIfNeeded() is True


def test_shallow_copy_has_its_own_training_flag(model, device):
    twin = copy.copy(model)
    model.eval()
    assert twin.training and not model.training


def test_unwrap_reaches_shallow_copies(model, device):
    twin = copy.copy(model)
    device.wrapping.undo()
    assert type(twin) is Net


def test_own_copy_method_is_used():
    class Copied(nn.Linear):
        def __copy__(self):
            twin = type(self)(2, 2)
            twin.note = type(self).__name__
            return twin

    twin = copy.copy(_wrapped(Copied(2, 2)))
    assert twin.note == "Copied"
    assert host_weights.is_wrapped(twin)


def test_shallow_copy_can_be_traced_with_fake_tensors(model, device):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.nn.utils.stateless import _reparametrize_module

    twin = copy.copy(model)
    before = list(map(id, all_tensors(model)))
    named = [*model.named_parameters(), *model.named_buffers()]
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(plain(tensor)) for name, tensor in named}
        x = torch.empty(4, 3)
        with _reparametrize_module(twin, fakes):
            assert isinstance(twin(x), FakeTensor)
    assert list(map(id, all_tensors(model))) == before
    assert host_weights.is_wrapped(model) and host_weights.is_wrapped(twin)


def test_functional_call_works(model, device):
    state = {name: torch.zeros_like(tensor) for name, tensor in model.named_parameters()}
    result = torch.func.functional_call(model, state, torch.ones(4, 3))
    assert result.tolist() == torch.zeros(4, 2).tolist()


# --- Lifetimes ---------------------------------------------------------------


def test_destroy_calls_the_executor(model, device):
    model.destroy()
    assert device.num_destroys == 1
    assert type(model) is Net


def test_executor_is_freed_with_its_last_reference(model):
    device = Device(model)
    ref = weakref.ref(device)
    del device
    assert ref() is None


def test_model_without_its_executor_reads_as_it_is(model):
    device = Device(model)
    del device
    assert model.scale.tolist() == [1.0, 1.0]
    assert model.copyWeightsToHostIfNeeded() is False


def test_model_without_its_executor_can_be_destroyed(model):
    device = Device(model)
    del device
    model.destroy()
    assert type(model) is Net


def test_dropped_model_and_tensors_are_freed_at_once():
    model = _wrapped(nn.Linear(2, 2))
    refs = [weakref.ref(model), weakref.ref(model.weight)]
    del model
    assert [ref() for ref in refs] == [None, None]


def test_classes_of_a_dropped_model_are_collected():
    ref = weakref.ref(type(_wrapped(nn.Linear(2, 2))))
    gc.collect()
    assert ref() is None
