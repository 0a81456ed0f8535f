"""Loops and branches next to what they stand for: Python's own, in eager PyTorch."""

import copy

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode
from tests.parity import compare
from tests.parity.compare import Loop
from tests.parity.tolerances import ONE_PASS, TRAINED

LEARNING_RATE = 0.1
ONCE = Loop()


def for_loop(count, body, inputs):
    """Repeat a function: a loop of the program on the device, Python's elsewhere."""
    if poptorch.isRunningOnIpu():
        return poptorch.for_loop(count, body, inputs)
    values = [value.clone() for value in inputs]
    for _ in range(count):
        values = _as_list(body(*values))
    return values


def cond(condition, then_body, then_inps, else_body, else_inps):
    """Call one of two functions: a branch of the program on the device, Python's elsewhere."""
    if poptorch.isRunningOnIpu():
        return poptorch.cond(condition, then_body, then_inps, else_body, else_inps)
    body, inputs = (then_body, then_inps) if condition else (else_body, else_inps)
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    return _as_list(body(*copies))


def _as_list(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


class Net(nn.Module):
    """Modules, weights and buffers that ``function(net, x)`` may use; in training with a loss."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 3)
        self.norm, self.layer_norm = nn.BatchNorm1d(4), nn.LayerNorm(4)
        self.conv = nn.Conv1d(1, 1, 3, padding=1)
        self.lstm, self.gru = nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4)
        self.embedding = nn.Embedding(10, 4)
        self.w = nn.Parameter(torch.randn(4) * 0.5)
        self.frozen = nn.Parameter(torch.randn(4) * 0.5, requires_grad=False)
        self.register_buffer("counter", torch.zeros(1))
        self.register_buffer("shift", torch.randn(4))

    def forward(self, x):
        results = _as_list(self.function(self, x))
        if not self.training:
            return tuple(results)
        floating = [result for result in results if result.is_floating_point()]
        loss = sum((result.float() ** 2).mean() for result in floating)
        return (*results, poptorch.identity_loss(loss, "none"))


def sample(*shape, seed=1):
    """Return the same random numbers for the same seed."""
    return torch.randn(shape or (4, 4), generator=torch.Generator().manual_seed(seed))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)


def check_inference(function, x, dtype=torch.float32):
    """Compare results and buffers of two calls with eager PyTorch."""
    net = Net(function).eval().to(dtype)
    twin = copy.deepcopy(net)
    options = Loop().options()
    device = poptorch.inferenceModel(net, options)
    for _ in range(2):
        ours = device(x)
        with torch.no_grad():
            expected = twin(x)
        for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
            assert_close(a, b, ONE_PASS[dtype], f"result {i}")
    device.copyWeightsToHost()
    _compare_states(net, twin, TRAINED[dtype])
    return device


def check_training(
    function, x, loop=ONCE, dtype=torch.float32, optimizer=sgd, steps=2, options=None
):
    """Compare results of some updates, and weights and buffers then, with eager PyTorch."""
    net = Net(function).to(dtype)
    twin = copy.deepcopy(net)
    options = options or loop.options()
    options.outputMode(OutputMode.All)
    device = poptorch.trainingModel(net, options, optimizer(net.parameters()))
    reference = optimizer(twin.parameters())
    for step in range(steps):
        ours = device(x)
        calls = []
        for number, part in enumerate(x.chunk(loop.micro_batches)):
            results = twin(part)
            (results[-1] / loop.accumulation).backward()
            calls.append([result.detach().clone() for result in results])
            if number % loop.accumulation == loop.accumulation - 1:
                reference.step()
                reference.zero_grad()
        for i, a in enumerate(ours):
            every = [results[i] if results[i].dim() else results[i][None] for results in calls]
            expected = torch.cat(every) if loop.micro_batches > 1 else calls[0][i]
            assert_close(a, expected, TRAINED[dtype], f"result {i} of step {step}")
    device.copyWeightsToHost()
    _compare_states(net, twin, TRAINED[dtype])
    return device


def assert_close(ours, expected, tolerance, what):
    """Compare; integers of 64 bits have 32 on the device."""
    if expected.dtype == torch.int64:
        expected = expected.int()
    compare.assert_close(ours, expected, tolerance, what)


def _compare_states(net, twin, tolerance):
    for (name, ours), expected in zip(
        net.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        if ours.is_floating_point():  # integer buffers are constants on the device
            assert_close(ours, expected, tolerance, name)
