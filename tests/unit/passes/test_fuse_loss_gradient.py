"""Fusing the gradients of a loss over classes and of log-softmax."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.ir import Graph, Phase, Tensor, TensorKind
from popsim_torch.passes.fuse_loss_gradient import fuse_loss_gradient
from tests.unit.passes.sketch import verify_sketch

F32 = torch.float32
LOSS = {"reduction": "mean", "ignore_index": -100, "classes": 3, "dtype": "float32"}


def backward_graph(axis: int = 1, *, log: bool = True, stage: int = 0) -> tuple[Graph, Tensor]:
    graph = Graph()
    gradient, total = (graph.add_tensor(TensorKind.INPUT, F32, ()) for _ in range(2))
    labels = graph.add_tensor(TensorKind.INPUT, torch.int64, (4,))
    y = graph.add_tensor(TensorKind.INPUT, F32, (4, 3))
    for_y, for_x = (graph.add_tensor(TensorKind.VALUE, F32, (4, 3)) for _ in range(2))
    place = {"phase": Phase.BACKWARD, "stage": stage}
    graph.add_op("nll_loss_grad", [gradient, total, labels, None], [for_y], LOSS, **place)
    attributes = {"axis": axis, "log": log, "dtype": "float32"}
    graph.add_op("softmax_grad", [for_y, y], [for_x], attributes, phase=Phase.BACKWARD)
    graph.add_op("anchor", [for_x], [], {}, phase=Phase.BACKWARD)
    return graph, for_y


def test_both_become_one_op() -> None:
    graph, _ = backward_graph()
    assert fuse_loss_gradient(graph) == 1
    verify_sketch(graph)
    fused, _ = graph.ops
    assert fused.kind == "cross_entropy_grad"
    assert fused.inputs == [0, 1, 2, -1, 3]
    assert fused.attributes == LOSS
    assert fuse_loss_gradient(graph) == 0


@pytest.mark.parametrize("change", [{"axis": 0}, {"log": False}, {"stage": 1}], ids=str)
def test_what_stays(change) -> None:
    graph, _ = backward_graph(**change)
    assert fuse_loss_gradient(graph) == 0
    assert [op.kind for op in graph.ops] == ["nll_loss_grad", "softmax_grad", "anchor"]


def test_a_gradient_with_another_reader_stays() -> None:
    graph, for_y = backward_graph()
    graph.add_op("anchor", [for_y], [], {}, phase=Phase.BACKWARD)
    assert fuse_loss_gradient(graph) == 0


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 4)
        self.log_softmax = nn.LogSoftmax(dim=1)
        self.loss = nn.NLLLoss()

    def forward(self, x, labels):
        y = self.log_softmax(self.fc(x))
        return y, self.loss(y, labels)


@pytest.mark.parametrize("anchored", [False, True])
def test_in_training(anchored) -> None:
    """An anchored gradient of the log-probabilities exists and is right; its name always exists."""
    torch.manual_seed(1)
    net = Classifier()
    x, labels = torch.randn(6, 5), torch.tensor([0, 3, 2, 1, 1, 0])
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    name = "Gradient___log_softmax/LogSoftmax:0"
    if anchored:
        options.anchorTensor("for_y", name)
    y, loss = net(x, labels)
    expected = torch.autograd.grad(loss, [y, net.fc.weight])
    weight = net.fc.weight.detach().clone()
    model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=1.0))
    _, ours = model(x, labels)
    torch.testing.assert_close(ours, loss.detach())
    torch.testing.assert_close(weight - net.fc.weight.detach(), expected[1])
    program = model.program(host=True)
    assert ("cross_entropy_grad" in program) != anchored
    if anchored:
        torch.testing.assert_close(model.getAnchoredTensor("for_y"), expected[0])
    assert any("LogSoftmax" in n and n.startswith("Gradient___") for n in model.getTensorNames())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_anchor_changes_no_bit(dtype) -> None:
    """The op that is now two ops rounds in the same places; 1/7 has no exact half."""
    weights = []
    for name in (None, "Gradient___log_softmax/LogSoftmax:0"):
        torch.manual_seed(3)
        net = Classifier().to(dtype)
        options = poptorch.Options()
        options.showCompilationProgressBar(False)
        if name:
            options.anchorTensor("for_y", name)
        model = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.5))
        for _ in range(3):
            model(torch.randn(7, 5, dtype=dtype), torch.randint(0, 4, (7,)))
        weights.append(net.fc.weight.detach().clone())
    assert torch.equal(*weights)
