"""``scan`` and ``map`` of ``torch._higher_order_ops``: values and gradients of a Python loop."""

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan as torch_scan
from torch.utils._pytree import tree_leaves

import popsim_torch as poptorch


def plain_scan(combine, init, xs, *, dim=0, reverse=False):
    leaves, structure = torch.utils._pytree.tree_flatten(xs)
    count, outputs = leaves[0].shape[dim], []
    for number in reversed(range(count)) if reverse else range(count):
        slices = [leaf.select(dim, number) for leaf in leaves]
        init, out = combine(init, torch.utils._pytree.tree_unflatten(slices, structure))
        outputs.append(out)
    if reverse:
        outputs.reverse()
    return init, torch.utils._pytree.tree_map(lambda *outs: torch.stack(outs, dim), *outputs)


def plain_map(function, xs, *args):
    results = [function(x, *args) for x in xs]
    return torch.utils._pytree.tree_map(lambda *outs: torch.stack(outs), *results)


PROGRAMS = {
    "sums": lambda m, scan, _, x: scan(lambda c, y: (c + y * m.weight, c * 2), x[0], x),
    "trees": lambda m, scan, _, x: scan(
        lambda c, y: ({"c": c["c"] * 0.5 + y[0]}, [y[1] * c["c"], m.layer(c["c"])]),
        {"c": x[0]},
        (x, x + 1),
        reverse=True,
    ),
    "another axis": lambda m, scan, _, x: scan(
        lambda c, y: (c + y, c * y.mean()), x[:, 0], x * m.weight, dim=1
    ),
    "one iteration": lambda m, scan, _, x: scan(lambda c, y: (c + y, y * m.weight), x[0], x[:1]),
    "layer": lambda m, _, mapped, x: mapped(lambda y: m.layer(y) * m.weight, x),
    "arguments": lambda m, _, mapped, x: mapped(lambda y, a: (y * a, y + 1), x, m.weight),
}


class Model(nn.Module):
    def __init__(self, program, scan, mapped):
        super().__init__()
        torch.manual_seed(0)
        self.program, self.scan, self.mapped = program, scan, mapped
        self.weight = nn.Parameter(torch.tensor(1.5))
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        result = self.program(self, self.scan, self.mapped, x)
        loss = sum(leaf.square().mean() for leaf in tree_leaves(result))
        return result, poptorch.identity_loss(loss, "none")


@pytest.mark.parametrize("name", PROGRAMS)
def test_inference_and_training(name):
    ours = Model(PROGRAMS[name], torch_scan, torch_map)
    eager = Model(PROGRAMS[name], plain_scan, plain_map)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(2))
    expected, loss = eager(x)
    wanted = [leaf.detach() for leaf in tree_leaves(expected)]
    found, _ = poptorch.inferenceModel(ours)(x)
    torch.testing.assert_close(tree_leaves(found), wanted)

    optimizer = poptorch.optim.SGD(ours.parameters(), lr=0.1)
    found, _ = poptorch.trainingModel(ours, optimizer=optimizer)(x)
    torch.testing.assert_close(tree_leaves(found), wanted)
    loss.backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    for mine, other in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), other.detach())


def test_inference_keeps_the_loop():
    def ops(count):
        model = poptorch.inferenceModel(Model(PROGRAMS["sums"], torch_scan, torch_map))
        model.compile(torch.randn(count, 3))
        return len(model.compiled.host_program.graph.ops)

    assert ops(4) == ops(40)
