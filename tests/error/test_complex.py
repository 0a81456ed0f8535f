"""What the device does not do with complex numbers."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Complex(nn.Module):
    """A model with a complex weight."""

    def __init__(self, function=torch.abs):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, dtype=torch.cfloat))
        self.function = function

    def forward(self, x):
        return poptorch.identity_loss(self.function(self.w * x), "sum")


def train(h, module, ga=1, **settings):
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.1, **settings)
    model = poptorch.trainingModel(module, h.make_options(ga=ga), optimizer)
    return model(torch.ones(2 * ga, 4))


def test_a_complex_loss(h):
    with pytest.raises(poptorch.Error, match=r"the loss is a complex number, .* loss\.abs\(\)"):
        train(h, Complex(lambda z: z))
    assert torch.equal(train(h, Complex()), torch.tensor(8.0))


@pytest.mark.parametrize("kind", ["accum_type", "velocity_accum_type"])
def test_states_of_half_precision(h, kind):
    settings = {"momentum": 0.9, "use_combined_accum": False, kind: torch.float16}
    with pytest.raises(poptorch.Error, match=r"a state of torch\.float16 for the parameter 'w'"):
        train(h, Complex(), ga=2, **settings)
    settings[kind] = torch.float32
    assert train(h, Complex(), ga=2, **settings).isfinite().all()


def test_accumulators_of_half_precision(h):
    options = h.make_options(ga=2)
    options.Training.gradientAccumulationDtype(torch.float16)
    module = Complex()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    model = poptorch.trainingModel(module, options, optimizer)
    with pytest.raises(poptorch.Error, match="has no complex numbers of half precision"):
        model(torch.ones(4, 4))


def test_kernels_of_users(h):
    poptorch.register_custom_op("Same", domain="popsim_tests.complex")(lambda x: x)

    def call(x, example):
        name, domain = "Same", "popsim_tests.complex"
        return poptorch.custom_op([x], name, domain, 1, example_outputs=[example])[0]

    def run(function):
        module = nn.Module()
        module.forward = function
        return poptorch.inferenceModel(module, h.make_options())(torch.ones(3))

    with pytest.raises(poptorch.Error, match=r"inputs\[0\] has the dtype .*view_as_real"):
        run(lambda x: call(x * 1j, x))
    with pytest.raises(poptorch.Error, match=r"example_outputs\[0\] has the dtype torch.complex64"):
        run(lambda x: call(x, x * 1j))
    pairs = run(lambda x: torch.view_as_complex(call(*[torch.view_as_real(x * 1j)] * 2)))
    assert torch.equal(pairs, torch.full((3,), 1j))


def test_operators_that_pytorch_refuses(h):
    def run(function):
        module = nn.Module()
        module.forward = function
        return poptorch.inferenceModel(module, h.make_options())(torch.ones(3))

    with pytest.raises(poptorch.Error, match=r"Softmax.*not implemented for 'ComplexFloat'"):
        run(lambda x: torch.softmax(x * 1j, 0))
    with pytest.raises(poptorch.Error, match=r"lhs is torch\.complex64"):
        run(
            lambda x: poptorch.serializedMatMul(
                x[None] * 1j, x[:, None] * 1j, poptorch.MatMulSerializationMode.InputChannels, 1
            )
        )
