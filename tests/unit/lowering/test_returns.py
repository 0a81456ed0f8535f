"""Anchors: which are copied in a run, which are read in place, and that both are correct."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode

MICRO_BATCH = 4


class Views(nn.Module):
    """A value, and several views of its memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 24).view(4, 6))

    def forward(self, x):
        value = torch.mm(x, self.weight)
        views = {
            "value": value,
            "transposed": value.t(),
            "merged": value.reshape(2, -1),
            "sliced": value[1:, 2:5],
            "expanded": value.unsqueeze(1).expand(-1, 3, -1),
        }
        for name, view in views.items():
            with poptorch.NameScope(name):
                views[name] = view * 1 if name == "value" else view
        self.seen = {name: tensor.detach() for name, tensor in views.items()}
        return poptorch.identity_loss(sum((view**2).sum() for view in views.values()), "sum")


def make_model(module, anchors, d=1, ga=1, mode=OutputMode.Final):
    options = poptorch.Options().showCompilationProgressBar(False)
    options.deviceIterations(d)
    options.Training.gradientAccumulation(ga)
    for name in anchors:
        options.anchorTensor(name, name, mode)
    optimizer = poptorch.optim.SGD(module.parameters(), lr=0.01)
    return poptorch.trainingModel(module, options, optimizer)


def make_input(d=1, ga=1):
    return torch.randn(d * ga * MICRO_BATCH, 4)


def all_names(x):
    model = make_model(Views(), [])
    model.compile(x)
    return model.getTensorNames()


def anchored_ops(model):
    """Return how many ops copy an anchor's tensor, without the model's output."""
    graph = model.compiled.host_program.graph
    return sum(op.kind == "anchor" for op in graph.ops) - 1


def test_final_values_are_read_from_where_they_lie() -> None:
    names = ["MatMul:0", "Transpose:0", "Slice:0/1", "Expand:0"]
    names += [f"Gradient___{name}" for name in ("weight", "MatMul:0", "Slice:0/1")]
    model = make_model(Views(), names)
    model.compile(make_input())
    assert anchored_ops(model) == 0


def test_rearranged_views_share_the_copy_of_their_tensor() -> None:
    x = make_input(d=2)
    views = ["MatMul:0", "Transpose:0", "Reshape:0"]
    model = make_model(Views(), views, d=2, mode=OutputMode.All)
    model.compile(x)
    assert anchored_ops(model) == 1


@pytest.mark.parametrize("mode", [OutputMode.Final, OutputMode.All, OutputMode.Sum])
@pytest.mark.parametrize(("d", "ga"), [(1, 1), (2, 3)])
def test_every_tensor_has_the_values_that_a_copy_of_it_alone_has(mode, d, ga) -> None:
    x = make_input(d, ga)
    names = all_names(make_input())
    together = make_model(Views(), names, d, ga, mode)
    for _ in range(2):
        together(x)
    some = ["input", "weight", "MatMul:0", "Slice:0/1", "Gradient___weight", "UpdatedVar___weight"]
    for name in some:
        alone = make_model(Views(), [name], d, ga, mode)
        for _ in range(2):
            alone(x)
        assert torch.equal(together.getAnchoredTensor(name), alone.getAnchoredTensor(name)), name


@pytest.mark.parametrize("mode", [OutputMode.Final, OutputMode.All])
def test_views_have_the_values_of_eager(mode) -> None:
    x = make_input(d=2)
    module = Views()
    found = {
        "transposed": "Transpose:0",
        "merged": "Reshape:0",
        "sliced": "Slice:0/1",
        "expanded": "Expand:0",
    }
    model = make_model(module, found.values(), d=2, mode=mode)
    model(x)
    eager = Views()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.01)
    expected = {view: [] for view in found}
    for batch in x.split(MICRO_BATCH):
        optimizer.zero_grad()
        eager(batch).backward()
        for view, values in expected.items():
            values.append(eager.seen[view])
        optimizer.step()
    for view, name in found.items():
        kept = expected[view] if mode == OutputMode.All else expected[view][-1:]
        torch.testing.assert_close(model.getAnchoredTensor(name), torch.cat(kept))


def test_what_was_read_does_not_change_with_later_runs() -> None:
    module = Views()
    name = "Gradient___weight"
    model = make_model(module, [name])
    model(make_input())
    first = model.getAnchoredTensor(name)
    before = first.clone()
    model(make_input())
    assert torch.equal(first, before)
    assert not torch.equal(model.getAnchoredTensor(name), before)
