"""Code that inspects a trace visits each in-place change once, however many follow each other."""

import torch

import popsim_torch as poptorch
from popsim_torch.trace.graph import parts


class Chain(torch.nn.Module):
    def __init__(self, iterations, *, cut):
        super().__init__()
        self.iterations, self.cut = iterations, cut

    def forward(self, x):
        x = x * 2
        row = x.unbind(0)[0] if self.cut else x
        for _ in range(self.iterations):
            row += 1
        return x


def looks(iterations, cut, monkeypatch):
    count = 0
    original = parts.is_in_place

    def counting(node):
        nonlocal count
        count += 1
        return original(node)

    with monkeypatch.context() as patch:
        patch.setattr(parts, "is_in_place", counting)
        found = poptorch.inferenceModel(Chain(iterations, cut=cut))(torch.ones(2, 2))
    assert found.tolist() == [[2 + iterations] * 2, [2 if cut else 2 + iterations] * 2]
    return count


def test_looks_at_changes_in_place_are_as_many_as_changes(monkeypatch):
    for cut in (False, True):
        few, many = looks(20, cut, monkeypatch), looks(80, cut, monkeypatch)
        assert (few > 0) == cut  # without a cut, the graph is rewritten and nobody looks
        assert many <= 5 * few
