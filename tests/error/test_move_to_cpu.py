"""Forward takes a device tensor to the host."""

import numpy as np
import pytest
import torch

import popsim_torch as poptorch


@pytest.mark.parametrize(
    "mistake",
    [
        lambda _, x: x.cpu() * 0,
        lambda _, x: x.to("cpu") * 0,
        lambda _, x: x.to(torch.device("cpu")) * 0,
        lambda _, x: x.to(device="cpu") * 0,
        lambda _, x: x.to("cpu", torch.float16) * 0,
        lambda _, x: x.numpy() and None,
        lambda _, x: x.detach().numpy() and None,
        lambda _, x: np.asarray(x) and None,
        lambda self, x: self.fc.weight.cpu() * 0,
        lambda _, x: torch.rand(1).cpu() * 0,
    ],
    ids=[
        "cpu",
        "to",
        "to device",
        "to keyword",
        "to and type",
        "numpy",
        "detach numpy",
        "asarray",
        "a parameter",
        "a random number",
    ],
)
def test_in_forward(refused, mistake):
    error = refused(mistake, poptorch.Error, "Illegal move to CPU")
    assert "Return the tensor from the model" in str(error)


def test_arithmetic_with_an_array(refused):
    error = refused(lambda _, x: x + np.ones(6), poptorch.Error, "Illegal move to CPU")
    assert "torch.from_numpy(array)" in str(error)


def test_moving_to_the_device_is_fine(h):
    class Moves(h.Net):
        def forward(self, x):
            assert x.device.type == "ipu"
            fixed = torch.tensor([1.0], device="cpu").to(x.device)
            return x.to("ipu") + fixed + torch.ones(1, device="ipu") + x.to("ipu:0")

    model = poptorch.inferenceModel(Moves(), h.make_options())
    assert model(torch.ones(2)).tolist() == [4.0, 4.0]
