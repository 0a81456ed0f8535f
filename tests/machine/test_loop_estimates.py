"""What loops cost whose number of passes is known, and those whose number is not."""

import pytest
import torch

import popsim_torch as poptorch


class _Counted(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.fc = torch.nn.Linear(64, 64)
        self.count = count

    def forward(self, x):
        return poptorch.for_loop(self.count, lambda y: torch.tanh(self.fc(y)), [x])[0]


class _Conditional(torch.nn.Module):
    def __init__(self, last):
        super().__init__()
        self.fc = torch.nn.Linear(64, 64)
        self.last = last

    def forward(self, x):
        start = torch.zeros((), dtype=torch.int32, device=x.device)
        return torch.while_loop(
            lambda i, _: i < self.last,
            lambda i, y: (i + 1, torch.tanh(self.fc(y))),
            (start, x),
        )[1]


def loop_of(model):
    (found,) = (op for op in poptorch.estimate(model, torch.zeros(4, 64)).ops if op.kind == "loop")
    return found


def test_a_loop_costs_as_many_passes_as_it_has():
    one, two, ten = (loop_of(_Counted(count)).cycles for count in (1, 2, 10))
    assert ten - one == pytest.approx(9 * (two - one))
    assert two > one


def test_a_loop_without_a_limit_counts_as_one_pass_and_says_so():
    loop = loop_of(_Conditional(3))
    assert loop.cycles < 3 * loop_of(_Counted(1)).cycles
    assert loop.cycles > 1000
    assert loop.formula == "bodies, one pass of a loop without a limit"
    assert loop.grade == "C"
    assert loop_of(_Counted(1)).formula == "bodies"


def test_values_do_not_change_what_a_loop_costs():
    assert loop_of(_Conditional(3)).cycles == loop_of(_Conditional(300)).cycles
