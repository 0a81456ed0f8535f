"""Operators that users define with torch.library run like PyTorch's own."""

import torch

import popsim_torch as poptorch


def define(library, name, repeats):
    """An operator that repeats its rows, with code without data and a gradient."""

    def forward(x):
        return x.repeat(repeats, 1)

    def fake(x):
        return x.new_empty(repeats * x.shape[0], x.shape[1])

    def backward(ctx, grad):
        return grad.reshape(repeats, -1, grad.shape[1]).sum(0)

    operator = torch.library.custom_op(
        f"{library}::{name}", forward, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    operator.register_fake(fake)
    operator.register_autograd(backward)
    return operator


class Repeat(torch.nn.Module):
    def __init__(self, operator):
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)
        self.operator = operator

    def forward(self, x):
        y = self.operator(self.fc(x))
        return y, poptorch.identity_loss(y.square(), reduction="mean")


def test_training():
    torch.manual_seed(0)
    model = Repeat(define("popsim_tests", "rows", 3))
    x = torch.randn(2, 3)
    y, loss = model(x)
    loss.backward()
    expected = model.fc.weight - 0.5 * model.fc.weight.grad
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.5)
    device = poptorch.trainingModel(model, optimizer=optimizer)
    results = device(x)
    torch.testing.assert_close(results[0], y)
    torch.testing.assert_close(results[1], loss)
    device.copyWeightsToHost()
    torch.testing.assert_close(model.fc.weight, expected)


def test_defined_anew():
    x = torch.randn(2, 3)
    for repeats in (2, 5):
        model = Repeat(define("popsim_tests", "rows_anew", repeats))
        results = poptorch.inferenceModel(model)(x)
        torch.testing.assert_close(results, model(x))
