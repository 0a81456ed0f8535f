"""Tests of ``host_weights``: optimizers, shared tensors, changes after wrapping."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from popsim_torch.executor import host_weights
from popsim_torch.executor.host_weights import wrap
from tests.unit.wrapped_model import Device, Net, all_tensors


@pytest.fixture
def model():
    return Net()


@pytest.fixture
def device(model):
    return Device(model)


# --- Optimizers, tied and shared tensors ----------------------------------------


@pytest.mark.parametrize("early", [True, False])
def test_optimizer_steps_wrapped_parameters(early):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0) if early else None
    wrap(model, lambda: False, lambda: None)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1.0)
    model.scale.sum().backward()
    optimizer.step()
    assert model.scale.tolist() == [0.0, 0.0]


def test_tied_parameter_stays_one_object():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    device = Device(model)
    assert model[1].weight is model[0].weight
    device.wrapping.undo()
    assert type(model[1].weight) is nn.Parameter


def test_buffer_shared_by_modules_is_restored():
    model = nn.Sequential(nn.Identity(), nn.Identity())
    shared = torch.zeros(1)
    for part in model:
        part.register_buffer("shared", shared)
    wrap(model, lambda: False, lambda: None).undo()
    assert type(shared) is torch.Tensor


def test_parameter_of_two_wrapped_models_asks_both():
    shared = nn.Linear(2, 2)
    models = [nn.Sequential(shared), nn.Sequential(shared)]
    asked = []
    for i, model in enumerate(models):
        wrap(model, lambda i=i: bool(asked.append(i)), lambda: None)
    shared.weight.sum()
    assert asked == [0, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_two_wrapped_models_unwrap_in_any_order(first):
    shared = nn.Linear(2, 2)
    models = [nn.Sequential(shared), nn.Sequential(shared)]
    asked = []
    wrappings = [
        wrap(model, lambda i=i: bool(asked.append(i)), lambda: None)
        for i, model in enumerate(models)
    ]
    wrappings[first].undo()
    shared.weight.sum()
    assert asked == [1 - first]
    wrappings[1 - first].undo()
    assert type(shared.weight) is nn.Parameter


# --- Changes of a wrapped model -----------------------------------------------


def test_half_keeps_the_model_wrapped(model, device):
    model.half()
    assert all(hasattr(type(t), "_popsim_links") for t in all_tensors(model))
    assert model.offset.dtype is torch.float16


def test_tensors_replaced_by_half_are_restored(model, device):
    old = model.offset
    model.half()
    device.wrapping.undo()
    assert type(model.offset) is torch.Tensor
    old.sum()
    assert type(old) is torch.Tensor


def test_swapping_conversion_works(model, device):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.half()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.scale.dtype is torch.float16
    device.wrapping.undo()
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_assigned_parameter_is_plain_afterwards(model, device):
    model.extra = nn.Parameter(torch.zeros(1))
    model.layer = nn.Linear(1, 1)
    device.wrapping.undo()
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_adopt_wraps_new_tensors(model, device):
    model.extra = nn.Parameter(torch.zeros(1))
    host_weights.adopt(model)
    device.train(4.0)
    assert model.extra.item() == 4.0


def test_assigning_load_adopts_the_new_tensors(model, device):
    state = {name: tensor.clone() for name, tensor in Net().state_dict().items()}
    model.load_state_dict(state, assign=True)
    device.train(4.0)
    assert model.scale.tolist() == [4.0, 4.0]


def test_load_state_dict_wins_over_older_device_weights(model, device):
    state = Net().state_dict()
    device.train(4.0)
    model.load_state_dict(state)
    assert model.scale.tolist() == [1.0, 1.0]


def test_parameter_can_be_replaced_and_deleted(model, device):
    model.scale = nn.Parameter(torch.zeros(2))
    del model.offset
    device.wrapping.undo()
    assert [name for name, _ in model.named_buffers(recurse=False)] == []
