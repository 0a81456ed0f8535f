"""The log lines of a compilation, and the progress bar."""

import sys

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(3, 2), "a", ipu_id=0)
        self.second = poptorch.BeginBlock(nn.Linear(2, 4), "b", ipu_id=1)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.fixture
def lines(caplog):
    """Compile a model at level DEBUG, and return the back end's lines."""

    def compiled(options, level="DEBUG"):
        poptorch.setLogLevel(level)
        model = poptorch.inferenceModel(Net(), options.showCompilationProgressBar(False))
        model.compile(torch.ones(8, 3))
        found = [record.getMessage() for record in caplog.records if record.name == "poptorch:cpp"]
        caplog.clear()
        return found

    yield compiled
    poptorch.setLogLevel("WARN")


def pipeline():
    return poptorch.Options().deviceIterations(8)


def test_each_op_has_a_line_with_its_place(lines):
    found = lines(pipeline())
    assert "first/Gemm:0 [float32(1, 2), mode(Pipelined), ipu(0), stage(0)]" in found
    assert "second/Gemm:0 [float32(1, 4), mode(Pipelined), ipu(1), stage(1)]" in found


def test_the_mode_is_that_of_the_strategy(lines):
    options = poptorch.Options()
    options.setExecutionStrategy(poptorch.ShardedExecution("a", "b"))
    found = lines(options)
    assert "second/Gemm:0 [float32(8, 4), mode(Sharded), ipu(1), stage(1)]" in found


def test_phases_have_a_number(lines):
    stages = [poptorch.Stage("a"), poptorch.Stage("b")]
    options = poptorch.Options().setExecutionStrategy(poptorch.SerialPhasedExecution(*stages))
    found = lines(options)
    assert "first/Gemm:0 [float32(8, 2), mode(Phased), ipu(0), phase(0)]" in found
    assert "second/Gemm:0 [float32(8, 4), mode(Phased), ipu(1), phase(1)]" in found


@pytest.mark.parametrize(
    ("mode", "period", "shown"),
    [
        (poptorch.OutputMode.All, 1, "ALL/1"),
        (poptorch.OutputMode.Final, 1, "FINAL/1"),
        (poptorch.OutputMode.EveryN, 4, "EVERYN/4"),
        (poptorch.OutputMode.Sum, 1, "Sum/1"),
    ],
)
def test_each_anchor_has_a_line(mode, period, shown, lines):
    options = poptorch.Options().deviceIterations(8)
    options.setExecutionStrategy(poptorch.ShardedExecution("a", "b"))
    options.anchorTensor("short", "first/Gemm:0", mode, period)
    assert f"anchor ( first/Gemm:0 {shown} )" in lines(options)


def test_the_program_is_shown_at_debug_ir_alone(lines):
    def is_program(line):
        return "\n" in line and "first/Gemm:0" in line

    assert any(map(is_program, lines(pipeline(), "DEBUG_IR")))
    assert not any(map(is_program, lines(pipeline(), "DEBUG")))


def test_nothing_is_said_by_default(lines):
    assert lines(pipeline(), "WARN") == []


# The progress bar


class Terminal:
    """A stream that says whether it is a terminal."""

    def __init__(self, is_terminal):
        self.is_terminal, self.text = is_terminal, ""

    def isatty(self):
        return self.is_terminal

    def write(self, text):
        self.text += text
        return len(text)

    def flush(self):
        pass


@pytest.mark.parametrize(
    ("is_terminal", "asked", "drawn"),
    [
        (True, None, True),
        (False, None, False),
        (False, True, True),
        (True, False, False),
        (False, False, False),
    ],
)
def test_the_bar_is_drawn_on_a_terminal_or_where_asked_for(is_terminal, asked, drawn, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal(is_terminal))
    options = poptorch.Options()
    if asked is not None:
        options.showCompilationProgressBar(asked)
    poptorch.inferenceModel(nn.ReLU(), options.clone()).compile(torch.ones(2))
    assert ("Graph compilation" in sys.stderr.text) is drawn


# What the executor says of mistakes


def trained(net):
    options = poptorch.Options().showCompilationProgressBar(False)
    model = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.1))
    model(torch.ones(2, 3), torch.ones(2, 2))
    return model


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, x, y):
        return nn.functional.mse_loss(self.fc(x), y)


def test_an_attribute_that_is_missing_is_said_to_be_so_of_the_users_class():
    model = trained(WithLoss())
    with pytest.raises(AttributeError, match=r"^'WithLoss' object has no attribute 'wieght'$"):
        _ = model.wieght


@pytest.mark.parametrize(
    ("optimizer", "error", "text"),
    [
        (torch.optim.LBFGS, AssertionError, "Unsupported optimizer type LBFGS"),
        (torch.optim.Adam, poptorch.Error, "Optimizer types do not match"),
    ],
)
def test_another_type_of_optimizer_is_refused_without_a_warning(optimizer, error, text, caplog):
    net = WithLoss()
    model = trained(net)
    with pytest.raises(error, match=text):
        model.setOptimizer(optimizer(net.parameters()))
    assert caplog.records == []
