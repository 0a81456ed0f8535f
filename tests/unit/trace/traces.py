"""The helpers for tests of tracing."""

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.stages import PipelinedExecution, StageAssigner
from popsim_torch.trace import TraceRequest, trace

aten = torch.ops.aten


def trace_of(module, *inputs, training=False):
    """Trace a module that is called with such tensors."""

    return trace(
        TraceRequest(
            module,
            [(tuple(x.shape), x.dtype) for x in inputs],
            lambda tensors: (tuple(tensors), {}),
            training,
            StageAssigner(PipelinedExecution()),
        )
    )


def calls(traced, *targets):
    """Return the graph's calls; if operators are given, only those of these operators."""
    nodes = [n for n in traced.graph_module.graph.nodes if n.op == "call_function"]
    return [n for n in nodes if not targets or n.target in targets]


def results(traced):
    return list(list(traced.graph_module.graph.nodes)[-1].args[0])


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 5)
        self.fc2 = nn.Linear(5, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x):
        out = self.fc2(torch.tanh(self.fc1(x))) + self.shift
        return out, poptorch.identity_loss(out, "mean")


X = torch.randn(2, 4)
