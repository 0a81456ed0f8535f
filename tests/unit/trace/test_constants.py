"""Host tensors that a traced model reads."""

import torch

import popsim_torch as poptorch
from popsim_torch.trace.graph.markers import CONSTANT
from tests.unit.trace.traces import Function, X, calls, trace_of


def test_host_tensors_become_constants():
    table = torch.tensor([1.0, 2.0, 3.0, 4.0])
    traced = trace_of(Function(lambda x: x + table), X)
    assert len(calls(traced, CONSTANT)) == 1
    assert torch.equal(traced.constants[0], table)


def test_a_host_tensor_is_captured_once():
    table = torch.ones(4)
    traced = trace_of(Function(lambda x: (x + table) * table), X)
    assert len(traced.constants) == 1
    assert len(calls(traced, CONSTANT)) == 1


def test_a_constant_has_the_value_of_its_use():
    table = torch.zeros(4)

    def function(x):
        x = x + table
        table.add_(1)
        return x + table

    traced = trace_of(Function(function), X)
    assert [float(value[0]) for value in traced.constants] == [0.0, 1.0]


def test_a_constant_is_not_the_users_memory():
    table = torch.zeros(4)
    traced = trace_of(Function(lambda x: x + table), X)
    table.fill_(9)
    assert torch.equal(traced.constants[0], torch.zeros(4))


def test_temporary_host_tensors_are_told_apart():
    """Python gives the id of a freed tensor to the next one."""

    def function(x):
        for value in range(5):
            x = x + torch.full((4,), float(value), device="cpu")
        return x

    traced = trace_of(Function(function), X)
    assert [float(value[0]) for value in traced.constants] == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_arithmetic_on_host_tensors_happens_now():
    table = torch.ones(4)
    traced = trace_of(Function(lambda x: x + (table * 2 + 1).sum()), X)
    assert [float(value) for value in traced.constants] == [12.0]


def test_a_tensor_made_in_inference_mode():
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            with torch.inference_mode():
                self.shift = torch.ones(2)

        def forward(self, x):
            return x + self.shift

    model = poptorch.inferenceModel(Shifted())
    torch.testing.assert_close(model(torch.ones(2)), torch.full((2,), 2.0))
