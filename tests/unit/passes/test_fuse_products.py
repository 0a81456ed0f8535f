"""Matrix products that include the operations after them: fewer ops, the same values."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.ir import Graph, Op, Phase, Tensor, TensorKind
from popsim_torch.passes.fuse_products import fuse_products
from tests.unit.passes.sketch import verify_sketch


def add_product(graph: Graph, m: int = 8, k: int = 5, n: int = 12) -> Tensor:
    a = graph.add_tensor(TensorKind.INPUT, torch.float32, (m, k))
    b = graph.add_tensor(TensorKind.INPUT, torch.float32, (k, n))
    out = graph.add_tensor(TensorKind.VALUE, torch.float32, (m, n))
    graph.add_op("matmul", [a, b], [out], phase=Phase.FORWARD)
    return out


def add_map(
    graph: Graph, inputs: list[Tensor], code: list[str], constants=(), shape=None
) -> Tensor:
    shape = shape or inputs[0].shape
    out = graph.add_tensor(TensorKind.VALUE, torch.float32, shape)
    attributes = {
        "code": code,
        "constants": list(constants),
        "results": [len(inputs) + len(constants) + len(code) - 1],
        "dtypes": ["float32"],
        "shape": list(shape),
    }
    graph.add_op("map", inputs, [out], attributes, phase=Phase.FORWARD)
    graph.add_op("anchor", [out], [], {}, phase=Phase.FORWARD)
    return out


def fused(graph: Graph) -> Op:
    verify_sketch(graph)
    assert fuse_products(graph) == 1
    verify_sketch(graph)
    product, *_ = graph.ops
    assert fuse_products(graph) == 0
    return product


@pytest.mark.parametrize("size", [(8, 5, 12), (100, 90, 80), (1, 90, 80)], ids=str)
def test_relu(size):
    graph = Graph()
    out = add_map(graph, [add_product(graph, *size)], ["relu 0"])
    product = fused(graph)
    assert product.attributes["activation"] == "relu"
    assert product.outputs == [out.id]


def test_a_product_with_half_partials_stays_what_it_is():
    """A float16 product includes no other operation, because the rounding would change."""
    graph = Graph()
    operands = [graph.add_tensor(TensorKind.INPUT, torch.float16, s) for s in ((8, 5), (5, 3))]
    product = graph.add_tensor(TensorKind.VALUE, torch.float16, (8, 3))
    graph.add_op("matmul", operands, [product], {"partials": "half"}, phase=Phase.FORWARD)
    bias = graph.add_tensor(TensorKind.VARIABLE, torch.float16, (3,))
    total = graph.add_tensor(TensorKind.VALUE, torch.float16, (8, 3))
    attributes = {
        "code": ["add 0 1"],
        "constants": [],
        "results": [2],
        "dtypes": ["float16"],
        "shape": [8, 3],
    }
    graph.add_op("map", [product, bias], [total], attributes, phase=Phase.FORWARD)
    relu = {**attributes, "code": ["relu 0"], "results": [1]}
    out = graph.add_tensor(TensorKind.VALUE, torch.float16, (8, 3))
    graph.add_op("map", [total], [out], relu, phase=Phase.FORWARD)
    graph.add_op("anchor", [out], [], {}, phase=Phase.FORWARD)
    assert fuse_products(graph) == 0
    assert graph.ops[0].attributes == {"partials": "half"}


def test_bias():
    graph = Graph()
    bias = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (80,))
    out = add_map(graph, [add_product(graph, 100, 90, 80), bias], ["add 0 1"])
    product = fused(graph)
    assert product.inputs[2] == bias.id
    assert product.outputs == [out.id]


def test_a_bias_per_row_stays():
    graph = Graph()
    bias = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (8, 1))
    add_map(graph, [add_product(graph), bias], ["add 0 1"])
    assert fuse_products(graph) == 0


@pytest.mark.parametrize("gradient_first", [True, False])
def test_mask(gradient_first):
    graph = Graph()
    mask = graph.add_tensor(TensorKind.INPUT, torch.float32, (2, 4, 12))
    product = add_product(graph)
    gradient = graph.add_view(product, (2, 4, 12), (48, 12, 1), 0)
    inputs = [gradient, mask] if gradient_first else [mask, gradient]
    code = ["le 1 2", "where 3 2 0"] if gradient_first else ["le 0 2", "where 3 2 1"]
    out = add_map(graph, inputs, code, [0.0])
    op = fused(graph)
    assert graph.root(graph.tensors[op.inputs[3]]) is mask
    assert graph.root(graph.tensors[op.outputs[0]]) is out


def test_a_threshold_that_is_not_zero_stays():
    graph = Graph()
    mask = graph.add_tensor(TensorKind.INPUT, torch.float32, (8, 12))
    add_map(graph, [add_product(graph), mask], ["le 1 2", "where 3 2 0"], [0.5])
    assert fuse_products(graph) == 0


def test_a_mask_of_the_mask_stays():
    # where(gradient <= 0, 0, mask): here the product is not the value that passes through.
    graph = Graph()
    mask = graph.add_tensor(TensorKind.INPUT, torch.float32, (8, 12))
    add_map(graph, [add_product(graph), mask], ["le 0 2", "where 3 2 1"], [0.0])
    assert fuse_products(graph) == 0


def test_a_product_with_two_readers_stays():
    graph = Graph()
    product = add_product(graph)
    add_map(graph, [product], ["relu 0"])
    graph.add_op("anchor", [product], [], {}, phase=Phase.FORWARD)
    assert fuse_products(graph) == 0


def test_a_product_that_is_kept_for_the_host_stays():
    graph = Graph()
    product = add_product(graph)
    add_map(graph, [product], ["relu 0"])
    product.kind = TensorKind.VARIABLE
    assert fuse_products(graph) == 0


def test_a_part_of_a_product_stays():
    graph = Graph()
    part = graph.add_view(add_product(graph), (4, 12), (12, 1), 0)
    add_map(graph, [part], ["relu 0"])
    assert fuse_products(graph) == 0


def add_update(graph: Graph, weight: Tensor, gradient: Tensor) -> Tensor:
    scalars = [graph.add_tensor(TensorKind.VARIABLE, torch.float32, ()) for _ in range(2)]
    out = graph.add_view(weight, weight.shape, weight.strides, 0)
    graph.add_op("sgd_update", [weight, gradient, *scalars], [out], phase=Phase.UPDATE)
    return out


def test_update():
    graph = Graph()
    weight = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (40, 30))
    gradient = add_product(graph, 40, 8, 30)
    a, b = graph.ops[0].inputs
    out = add_update(graph, weight, gradient)
    update = fused(graph)
    assert (update.kind, update.phase) == ("sgd_product_update", Phase.UPDATE)
    assert update.inputs[:3] == [weight.id, a, b]
    assert update.outputs == [out.id]


def test_an_update_keeps_the_gradient_that_the_host_reads():
    graph = Graph()
    weight = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (40, 30))
    gradient = add_product(graph, 40, 8, 30)
    gradient.kind = TensorKind.VARIABLE
    add_update(graph, weight, gradient)
    update = fused(graph)
    assert [graph.root(graph.tensors[i]) for i in update.outputs] == [weight, gradient]


def test_an_update_joins_a_long_product():
    graph = Graph()
    weight = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (80, 90))
    add_update(graph, weight, add_product(graph, 80, 100, 90))
    assert fuse_products(graph) == 1
    assert [op.kind for op in graph.ops] == ["sgd_product_update"]


def test_operands_larger_than_the_gradient_are_not_kept_for_the_update():
    graph = Graph()
    weight = graph.add_tensor(TensorKind.VARIABLE, torch.float32, (4, 5))
    gradient = add_product(graph, 4, 60, 5)
    for tensor_id in graph.ops[0].inputs:
        graph.tensors[tensor_id].kind = TensorKind.VALUE
    graph.ops[0].phase = Phase.BACKWARD
    add_update(graph, weight, gradient)
    assert fuse_products(graph) == 0


def _check_last_gradient(ours: torch.Tensor) -> None:
    torch.manual_seed(3)
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    for _ in range(5):
        optimizer.zero_grad()
        model.fc2(torch.relu(model.fc1(torch.randn(16, 50)))).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(ours, model.fc1.weight.grad, rtol=1e-4, atol=1e-6)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(50, 40)
        self.fc2 = nn.Linear(40, 30)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.fc2(torch.relu(self.fc1(x)))
        return y, poptorch.identity_loss(y.square(), "mean")


@pytest.mark.parametrize("mode", [poptorch.OutputMode.Final, poptorch.OutputMode.All])
@pytest.mark.parametrize("anchors", [["Gradient___fc1.weight"], ["fc1/Gemm:0", "Relu:0"]])
def test_anchors_change_no_bit(anchors, mode):
    """An anchored tensor has one more reader, so the op that writes it is not fused."""
    weights, results = [], []
    for names in ([], anchors):
        torch.manual_seed(3)
        model = Mlp()
        options = poptorch.Options().showCompilationProgressBar(False)
        for name in names:
            options.anchorTensor(name, name, output_mode=mode)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
        trainer = poptorch.trainingModel(model, options, optimizer)
        results.append([trainer(torch.randn(16, 50))[0] for _ in range(5)])
        weights.append([p.detach().clone() for p in model.parameters()])
        if "Gradient___fc1.weight" in names:
            _check_last_gradient(trainer.getAnchoredTensor(names[0]))
    for ours, theirs in zip(weights[0] + results[0], weights[1] + results[1], strict=True):
        assert torch.equal(ours, theirs)
