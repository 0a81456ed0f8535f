"""Reads at a mask that only a run knows: the error says what to write instead."""

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


def add(y, mask):
    y[mask] += 1
    return y


@pytest.mark.parametrize("read", [add, lambda y, mask: y[mask].sum()], ids=["change", "sum"])
def test_a_read_at_a_mask(read):
    model = poptorch.inferenceModel(Reading(read))
    with pytest.raises(poptorch.Error, match=r"torch\.where\(mask, y \+ z, y\)") as caught:
        model(torch.randn(4))
    assert "test_masks_of_the_device.py" in str(caught.value)


def test_positions_of_a_mask():
    model = poptorch.inferenceModel(Reading(lambda y, mask: mask.nonzero()))
    with pytest.raises(poptorch.Error, match="fixed sizes"):
        model(torch.randn(4))
