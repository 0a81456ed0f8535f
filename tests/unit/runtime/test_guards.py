"""While a program runs, other users get a clear error and never see half-written values."""

import threading
import time

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import _native
from popsim_torch.errors import Error
from popsim_torch.executor.host_weights import without_sync

pytestmark = pytest.mark.timeout(120)

COUNT = 300_000


class Running:
    """A long call in another thread for a ``with`` block; it is stopped at the end."""

    def __init__(self, model, *args):
        self._model, self._args = model, args
        self._thread = threading.Thread(target=self._run)
        self.executable = model.compiled.executable
        self.errors = []

    def _run(self):
        try:
            self._model(*self._args)
        except poptorch.Error as error:
            self.errors.append(str(error))

    def __enter__(self):
        before = self.executable.num_runs
        self._thread.start()
        while self.executable.num_runs == before:
            time.sleep(0.0005)
        return self

    def __exit__(self, *_):
        # The block overlapped with the run: at its end the run could still be stopped.
        was_running = self.executable.stop()
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert was_running
        assert "stopped after" in self.errors[0]


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        x = self.fc(x)
        return x, poptorch.identity_loss((x**2).mean(), "none")


def make_trainer():
    net = Regression()
    options = poptorch.Options().showCompilationProgressBar(False).deviceIterations(COUNT)
    options.anchorTensor("weight", "fc.weight", poptorch.OutputMode.Final)
    options.anchorTensor("all", "fc/Gemm:0", poptorch.OutputMode.Sum)
    optimizer = poptorch.optim.SGD(net.parameters(), lr=1e-4, momentum=0.9)
    model = poptorch.trainingModel(net, options, optimizer)
    x = torch.ones(1, 8).expand(COUNT, 8).contiguous()
    model.compile(x)
    return net, model, optimizer, x


def test_whatever_touches_the_device_is_refused_while_it_runs():
    net, model, optimizer, x = make_trainer()
    new = poptorch.optim.SGD(net.parameters(), lr=1e-5, momentum=0.9)
    uses = [
        lambda: net.fc.weight.sum(),
        lambda: net.state_dict(),
        model.copyWeightsToHost,
        model.copyWeightsToDevice,
        lambda: model.rng_state,
        lambda: setattr(model, "rng_state", [1, 2]),
        lambda: optimizer.state_dict(),
        lambda: model.setOptimizer(new),
        lambda: model.getAnchoredTensor("weight"),
        lambda: model.getAnchoredTensor("all"),
        lambda: model(x),
        lambda: model.profile(x),
        model.destroy,
    ]
    with Running(model, x):
        for use in uses:
            with pytest.raises(Error, match=r"running|another thread is in it"):
                use()
    assert model.isCompiled()
    # After it, everything works as before.
    model.copyWeightsToHost()
    assert torch.equal(
        net.fc.weight.detach(),
        model.compiled.executable.read(model.compiled.program.parameters["fc.weight"]),
    )


def test_the_executable_itself_refuses_copies_while_it_runs():
    _, model, _, x = make_trainer()
    weight = model.compiled.program.parameters["fc.weight"]
    value = torch.zeros(8, 8)
    with Running(model, x) as running:
        executable = running.executable
        uses = [
            lambda: executable.read(weight),
            lambda: executable.read_all([weight]),
            lambda: executable.read_into({weight: value}),
            lambda: executable.write(weight, value),
            lambda: executable.write_all({weight: value}),
            lambda: executable.seed,
            lambda: executable.step,
            lambda: setattr(executable, "seed", 1),
            lambda: setattr(executable, "step", 1),
            lambda: executable.profile([x], 1),
            lambda: executable.run([x]),
            executable.load,
        ]
        for use in uses:
            refused = pytest.raises(Error, match=r"this executable is (already )?running")
            with refused, _native.translated_errors():
                use()


def test_an_inference_model_of_weights_in_training_is_refused():
    net, model, _, x = make_trainer()
    options = poptorch.Options().showCompilationProgressBar(False)
    other = poptorch.inferenceModel(net, options)
    one = x[:1]
    other(one)
    with Running(model, x), pytest.raises(Error, match="this executable is running"):
        other(one)
    out, _ = other(one)
    torch.testing.assert_close(out, net(one)[0])


def test_weights_read_between_runs_of_another_thread_are_whole():
    """Reading meets a run or the time between runs: an error, or the weights after a whole run."""
    short = 300
    options = poptorch.Options().showCompilationProgressBar(False).deviceIterations(short)

    class Equal(nn.Module):
        """A model whose weights are all minus the number of updates."""

        def __init__(self):
            super().__init__()
            self.parts = nn.ParameterList(torch.zeros(64) for _ in range(20))

        def forward(self, x):
            return poptorch.identity_loss(sum((p * x).sum() for p in self.parts), "none")

    net = Equal()
    optimizer = poptorch.optim.SGD(net.parameters(), lr=1.0)
    model = poptorch.trainingModel(net, options, optimizer)
    x = torch.ones(short, 1)
    model.compile(x)
    end = time.monotonic() + 3
    errors = []

    def train():
        while time.monotonic() < end:
            try:
                model(x)
            except poptorch.Error as error:
                errors.append(str(error))

    thread = threading.Thread(target=train)
    thread.start()
    num_read = num_refused = 0
    while time.monotonic() < end:
        try:
            model.copyWeightsToHost()
            with without_sync():
                values = torch.stack([part.data for part in net.parts])
        except poptorch.Error as error:
            assert "running" in str(error) or "is reading or writing" in str(error)
            num_refused += 1
            continue
        num_read += 1
        assert values.unique().numel() == 1
        assert values[0, 0] % short == 0
    thread.join(30)
    assert not thread.is_alive()
    assert num_read > 0
    assert num_refused > 0
    assert all("thread" in error for error in errors)
