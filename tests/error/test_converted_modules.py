"""Forward converts a module of the model to another dtype."""

import pytest
import torch

import popsim_torch as poptorch


@pytest.mark.parametrize(
    "mistake",
    [
        lambda self, x: self.fc.half()(x.half()),
        lambda self, x: self.to(torch.float16).fc(x.half()),
    ],
)
def test_in_forward(refused, mistake):
    error = refused(mistake, poptorch.Error, "convert the module before the model is wrapped")
    assert "'weight' of a Linear from torch.float32 to torch.float16" in str(error)
    assert "test_converted_modules.py:" in str(error)
