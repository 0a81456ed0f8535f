"""Uses of elements at a mask that only a run knows: the error says what to write instead."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Reading(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read

    def forward(self, x):
        return self.read(x.clone(), x > 0)


def with_another_mask(y, mask):
    y[y > 0] = y[mask] * 2
    return y


def with_a_changed_mask(y, mask):
    found = y[mask]
    mask &= y > 1
    y[mask] = found
    return y


def random_numbers(y, mask):
    y[mask] = torch.rand_like(y[mask])
    return y


READS = {
    "return": lambda y, mask: y[mask],
    "return in a list": lambda y, mask: (y, [y[mask]]),
    "shape": lambda y, mask: y.sum() * y[mask].shape[0],
    "numel": lambda y, mask: y.sum() * y[mask].numel(),
    "shape of a layer norm": lambda y, mask: nn.functional.layer_norm(y[mask], y[mask].shape),
    "len": lambda y, mask: y.sum() * len(y[mask]),
    "iteration": lambda y, mask: sum(one for one in y[mask]),
    "item": lambda y, mask: y.sum() * y[mask].item(),
    "bool": lambda y, mask: y if y[mask] else -y,
    "cpu": lambda y, mask: y[mask].cpu(),
    "first": lambda y, mask: y[mask][0],
    "sort": lambda y, mask: y[mask].sort()[0],
    "cumsum": lambda y, mask: y[mask].cumsum(0).sum(),
    "max": lambda y, mask: y[mask].max(),
    "cat": lambda y, mask: torch.cat([y[mask], y]),
    "stack": lambda y, mask: torch.stack([y[mask], y[mask]]).sum(),
    "softmax": lambda y, mask: y[mask].softmax(0).sum(),
    "loss": lambda y, mask: nn.functional.mse_loss(y[mask], y[~mask]),
    "loss with other labels": lambda y, mask: nn.functional.mse_loss(y[mask], torch.ones(2)),
    "a function of all rows": lambda y, mask: nn.BatchNorm1d(2)(y.reshape(2, 2)[mask[:2]]).sum(),
    "a sum over rows": lambda y, mask: y.reshape(2, 2)[mask[:2]].sum(0),
    "another shape": lambda y, mask: y.reshape(2, 2)[mask[:2]].reshape(-1).sum(),
    "some rows": lambda y, mask: y.reshape(2, 2)[mask[:2]][1:].sum(),
    "own function": lambda y, mask: poptorch.ipu_print_tensor(y[mask]),
    "a tensor of one element": lambda y, mask: (y[mask] + torch.ones(1)).sum(),
    "another mask": with_another_mask,
    "a changed mask": with_a_changed_mask,
    "another selection": lambda y, mask: (y[mask] + y[~mask]).sum(),
    "random numbers": random_numbers,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_use_of_elements_at_a_mask(read):
    model = poptorch.inferenceModel(Reading(read))
    with pytest.raises(poptorch.Error, match=r"y = torch\.where\(mask, f\(z\), y\)") as caught:
        model(torch.tensor([1.0, -2.0, 3.0, 0.5]))
    assert "z[mask] at " in str(caught.value)
    assert "test_masks_of_the_device.py" in str(caught.value)


def in_a_loop(y, mask):
    return poptorch.for_loop(2, lambda z: (z * 2,), [y[mask]])[0]


def other_data(y, mask):
    y.data = y[mask]
    return y


# What PyTorch does without a look at the mode of the trace.
INSIDE = {
    "loop": in_a_loop,
    "data": other_data,
    "cond": lambda y, mask: torch.cond(mask.any(), torch.neg, torch.abs, (y[mask],)),
    "vmap": lambda y, mask: torch.vmap(torch.neg)(y[mask]).sum(),
    "list of tensors": lambda y, mask: torch.tensor([y[mask], y[mask]]),
    "gradient": lambda y, mask: torch.func.grad(torch.sum)(y[mask]).sum(),
    "class": lambda y, mask: y[mask].as_subclass(torch.Tensor).sum(),
    "transposed": lambda y, mask: y[mask].T.sum(),
}


@pytest.mark.parametrize("name", INSIDE)
def test_a_tensor_without_elements_is_not_used(name):
    model = poptorch.inferenceModel(Reading(INSIDE[name]))
    with pytest.raises(poptorch.Error, match=r"elements of z\[mask\] at .*depends on values"):
        model(torch.tensor([1.0, -2.0, 3.0, 0.5]))


SHAPES = {
    "new_zeros": lambda y, mask: y[mask].new_zeros(y[mask].shape),
    "ones": lambda y, mask: torch.ones(y[mask].shape),
    "full": lambda y, mask: torch.full(size=y[mask].size(), fill_value=2.0),
    "expand": lambda y, mask: torch.zeros(1).expand(y[mask].shape),
    "normal": lambda y, mask: torch.normal(0.0, 1.0, y[mask].shape),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_among_the_arguments(name):
    model = poptorch.inferenceModel(Reading(SHAPES[name]))
    message = rf"elements of z\[mask\] depends on .* '{name}' at .*test_masks_of_the_device.py:\d+"
    with pytest.raises(poptorch.Error, match=message):
        model(torch.tensor([1.0, -2.0, 3.0, 0.5]))


def test_a_name_that_no_tensor_has():
    model = poptorch.inferenceModel(Reading(lambda y, mask: y[mask].elements))
    with pytest.raises(AttributeError, match="'Tensor' object has no attribute 'elements'"):
        model(torch.randn(4))


def test_part_of_an_index():
    model = poptorch.inferenceModel(Reading(lambda y, mask: y.reshape(2, 2)[:, mask[:2]]))
    with pytest.raises(poptorch.Error, match=r"torch\.where\(mask, y \+ z, y\)") as caught:
        model(torch.randn(4))
    assert "test_masks_of_the_device.py" in str(caught.value)


def test_positions_of_a_mask():
    model = poptorch.inferenceModel(Reading(lambda y, mask: mask.nonzero()))
    with pytest.raises(poptorch.Error, match="fixed sizes"):
        model(torch.randn(4))
