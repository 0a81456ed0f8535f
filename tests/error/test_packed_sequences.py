"""Packed sequences, whose sizes depend on the lengths: the error says where and what to do."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.GRU(3, 4)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return self.layer(packed)[1]


def test_lengths_that_only_a_run_knows():
    model = poptorch.inferenceModel(Packed())
    with pytest.raises(poptorch.Error, match="Give the lengths as Python numbers") as caught:
        model(torch.randn(5, 3, 3), torch.tensor([5, 3, 2]))
    assert "pass the padded sequence" in str(caught.value)
    assert "_pack_padded_sequence" in str(caught.value)
    assert "test_packed_sequences.py" in str(caught.value)
