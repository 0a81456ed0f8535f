"""Python numbers in functions that torch.func transforms."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

CALLS = {
    "vmap": lambda x: torch.vmap(lambda z: 0.5 * z.sum())(x),
    "integer": lambda x: torch.vmap(lambda z: 3 * z.sum() + 1)(x),
    "bool": lambda x: torch.vmap(lambda z: z.sum() * True)(x),
    "division": lambda x: torch.vmap(lambda z: 2.0 / z.sum())(x),
    "complex": lambda x: torch.vmap(lambda z: (z.sum() * 2j).imag)(x),
    "nested": lambda x: torch.vmap(torch.vmap(lambda z: 0.5 * z))(x),
    "gradient": lambda x: torch.vmap(torch.func.grad(lambda z: 0.5 * (z**2).sum()))(x),
    "hessian": lambda x: torch.func.hessian(lambda q: 0.5 * (q**3).sum())(x),
    "jacfwd": lambda x: torch.func.jacfwd(lambda q: 0.5 * (q**2).sum())(x),
    "jacrev": lambda x: torch.func.jacrev(lambda q: 0.5 * q.sum(1))(x),
    "with a change": lambda x: torch.vmap(lambda z: (0.5 * z.sum()).mul_(3.0))(x * 1),
}


class Call(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.w = nn.Parameter(torch.arange(6.0).view(3, 2) + 1)
        self._function = function

    def forward(self, x):
        y = self._function(self.w * x)
        return y, poptorch.identity_loss((y * y).sum(), "none")


@pytest.mark.parametrize("name", CALLS)
def test_inference(name):
    model, x = Call(CALLS[name]), torch.rand(3, 2) + 1
    out, _ = poptorch.inferenceModel(model, make_options())(x)
    torch.testing.assert_close(out, model(x)[0].detach().float())  # (float64 from jacfwd)


@pytest.mark.parametrize("name", CALLS)
def test_training(name):
    model, x = Call(CALLS[name]), torch.rand(3, 2) + 1
    eager = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    options = make_options()
    options.anchorTensor("gradient", "Gradient___w")
    device = poptorch.trainingModel(model, options, optimizer)
    y, loss = eager(x)
    if not loss.requires_grad:
        pytest.skip("no gradient")
    out, _ = device(x)
    loss.backward()
    torch.testing.assert_close(out, y.detach().float())
    torch.testing.assert_close(device.getAnchoredTensor("gradient"), eager.w.grad)


def test_body_of_a_loop():
    class Loop(nn.Module):
        def forward(self, x):
            def body(y):
                return (y * torch.vmap(lambda z: 0.5 * z.sum())(y).unsqueeze(1),)

            return poptorch.for_loop(2, body, [x])[0]

    x = torch.rand(3, 2)
    expected = x
    for _ in range(2):
        expected = expected * (0.5 * expected.sum(1, keepdim=True))
    torch.testing.assert_close(poptorch.inferenceModel(Loop(), make_options())(x), expected)
