"""The data that torch.fx keeps of the graphs of a compilation."""

import linecache

import pytest
import torch
from torch import nn
from torch.fx import graph_module, symbolic_trace

import popsim_torch as poptorch


class Net(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.fails = fails

    def forward(self, x):
        if self.fails:
            raise ValueError("no")
        return poptorch.identity_loss(torch.relu(self.fc(x)), "sum")


def kept():
    generated = {name for name in linecache.cache if name.startswith("<eval_with_key>")}
    return set(graph_module._loader.eval_cache), generated


@pytest.mark.parametrize("fails", [False, True], ids=["compiles", "fails"])
def test_compiling_leaves_no_source_behind(fails):
    users = symbolic_trace(nn.Sequential(nn.ReLU()))
    before = kept()
    assert before[0]
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    training = poptorch.trainingModel(Net(fails), options)
    if fails:
        with pytest.raises(ValueError, match="no"):
            training(torch.ones(2, 3))
    else:
        training(torch.ones(2, 3))
    training.destroy()
    assert kept() == before
    assert users(torch.tensor([-1.0])).item() == 0.0
