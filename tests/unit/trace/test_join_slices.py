"""Gradients of the parts of a tensor are joined instead of added up."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import popsim_torch as poptorch
from popsim_torch.trace.join_slices import join_slices

aten = torch.ops.aten
SIZES = [4, 6, 5]


def traced(function, *inputs: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def targets(module: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


def selects(a, b, c, d):
    parts = [aten.select_backward(g, SIZES, 0, i) for g, i in ((c, 2), (a, 0), (d, -1), (b, 1))]
    return (parts[0] + parts[1]) + (parts[2] + parts[3])


def slices(a, b, c):
    left = aten.slice_backward(a, SIZES, 1, 0, 2, 1)
    middle = aten.slice_backward(b, SIZES, 1, 2, -1, 1)
    right = aten.slice_backward(c, SIZES, 1, 5, 9223372036854775807, 1)
    return left + middle + right


def rows(count: int = 4) -> list[torch.Tensor]:
    return [torch.randn(6, 5) for _ in range(count)]


def columns(*widths: int) -> list[torch.Tensor]:
    return [torch.randn(4, width, 5) for width in widths]


@pytest.mark.parametrize(
    ("function", "inputs"), [(selects, rows()), (slices, columns(2, 3, 1))], ids=["rows", "slices"]
)
def test_parts_that_cover_the_tensor_are_joined(function, inputs):
    module = traced(function, *inputs)
    assert join_slices(module.graph) == 1
    module.graph.lint()
    module.recompile()
    assert set(targets(module)) <= {aten.cat.default, aten.unsqueeze.default}
    assert torch.equal(module(*inputs), function(*inputs))
    for node in module.graph.nodes:
        if node.target is aten.cat.default:
            assert list(node.meta["val"].shape) == SIZES
    assert join_slices(module.graph) == 0


def overlapping(a, b):
    return aten.slice_backward(a, SIZES, 1, 0, 4, 1) + aten.slice_backward(b, SIZES, 1, 2, 6, 1)


def with_a_gap(a, b):
    return aten.slice_backward(a, SIZES, 1, 0, 2, 1) + aten.slice_backward(b, SIZES, 1, 4, 6, 1)


def every_other(a, b):
    return aten.slice_backward(a, SIZES, 1, 0, 6, 2) + aten.slice_backward(b, SIZES, 1, 1, 6, 2)


def along_two_axes(a, b):
    return aten.slice_backward(a, SIZES, 1, 0, 3, 1) + aten.slice_backward(b, SIZES, 0, 2, 4, 1)


def twice(a, b):
    left = aten.slice_backward(a, SIZES, 1, 0, 3, 1)
    total = left + aten.slice_backward(b, SIZES, 1, 3, 6, 1)
    return total, left


def scaled(a, b):
    left = aten.slice_backward(a, SIZES, 1, 0, 3, 1)
    return torch.add(left, aten.slice_backward(b, SIZES, 1, 3, 6, 1), alpha=2)


@pytest.mark.parametrize(
    ("function", "inputs"),
    [
        (overlapping, columns(4, 4)),
        (with_a_gap, columns(2, 2)),
        (every_other, columns(3, 3)),
        (along_two_axes, [torch.randn(4, 3, 5), torch.randn(2, 6, 5)]),
        (twice, columns(3, 3)),
        (scaled, columns(3, 3)),
    ],
)
def test_other_sums_stay(function, inputs):
    module = traced(function, *inputs)
    before = str(module.graph)
    assert join_slices(module.graph) == 0
    assert str(module.graph) == before


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, b, c = self.layer(x).view(-1, 3, 4).unbind(1)
        d, e = (a * b - c).chunk(2, dim=1)
        y = torch.stack([d * e, d + e])
        return y, poptorch.identity_loss(y.square(), "mean")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_of_parts_against_eager(dtype):
    model = Parts().to(dtype)
    x = torch.randn(8, 6).to(dtype)
    options = poptorch.Options().showCompilationProgressBar(False)
    options.anchorTensor("gradient", "Gradient___layer/Gemm:0")
    trainer = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.0))
    trainer(x)
    hidden = model.layer(x).detach().requires_grad_()
    a, b, c = hidden.view(-1, 3, 4).unbind(1)
    d, e = (a * b - c).chunk(2, dim=1)
    torch.stack([d * e, d + e]).square().mean().backward()
    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    ours = trainer.getAnchoredTensor("gradient")
    torch.testing.assert_close(ours, hidden.grad, rtol=tolerance, atol=tolerance)
