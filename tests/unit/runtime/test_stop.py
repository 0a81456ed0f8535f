"""Runs that are stopped from outside: by Ctrl-C, another signal's handler, or another thread."""

import signal
import threading
import time

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import _native
from tests.options import make_options as some_options
from tests.sweeps import one_by_one

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def ctrl_c():
    """Handle Ctrl-C as Python does in a terminal; background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Net(nn.Module):
    """A model with dropout, and with running statistics that change in every micro-batch."""

    def __init__(self, width=32, stages=(0, 0), momentum=0.1):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, width), nn.Linear(width, 2)
        self.norm, self.drop = nn.BatchNorm1d(width, momentum=momentum), nn.Dropout(0.3)
        self._stages = stages

    def forward(self, x):
        poptorch.Block.start(ipu_id=self._stages[0])
        x = self.drop(self.norm(torch.tanh(self.first(x))))
        poptorch.Block.start(ipu_id=self._stages[1])
        x = self.second(x)
        return x, poptorch.identity_loss((x**2).mean(), "none")


def make_options(iterations, accumulation=1):
    options = some_options(iterations, accumulation, seed=7)
    return options.outputMode(poptorch.OutputMode.Final)


def make_trainer(iterations, accumulation, kind, stages=(0, 0), batch=4, momentum=0.1):
    net = Net(stages=stages, momentum=momentum)
    model = poptorch.trainingModel(net, make_options(iterations, accumulation), kind(net))
    torch.manual_seed(1)
    sample = torch.randn(batch * accumulation, 4)
    return net, model, sample.repeat(iterations, 1)


def plain_sgd(net):
    return poptorch.optim.SGD(net.parameters(), lr=0.01)


def combined_sgd(net):
    return poptorch.optim.SGD(
        net.parameters(), lr=0.01, momentum=0.9, use_combined_accum=True, weight_decay=0.01
    )


def adam(net):
    return poptorch.optim.Adam(net.parameters(), lr=0.01)


def interrupted(model, x, seconds=0.05):
    """Press Ctrl-C shortly after a call begins; return how long the call took to end then (s)."""
    executable = model.compiled.executable
    before = executable.num_runs
    pressed = []

    def watch():
        while executable.num_runs == before:
            time.sleep(0.001)
        time.sleep(seconds)
        pressed.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=watch)
    thread.start()
    finished = False
    with pytest.raises(KeyboardInterrupt):
        model(x)
        finished = True
        thread.join()
        time.sleep(1)
    assert not finished, "the call was over before the key was pressed"
    took = time.monotonic() - pressed[0]
    thread.join()
    return took


def state_of(net):
    return {name: value.clone() for name, value in net.state_dict().items()}


@pytest.mark.parametrize(
    ("kind", "stages", "loop", "seconds"),
    one_by_one(
        [plain_sgd, combined_sgd, adam],
        [(0, 0), (0, 1)],
        [(100_000, 4), (1, 400_000)],
        [0.05, 0.15],  # before the first check for signals, and later
    ),
)
def test_ctrl_c_leaves_what_whole_device_iterations_left(kind, stages, loop, seconds):
    iterations, accumulation = loop
    net, model, x = make_trainer(iterations, accumulation, kind, stages)
    model.compile(x)
    assert interrupted(model, x, seconds) < 1.0
    seed, step = model.rng_state
    assert step % accumulation == 0
    assert 0 <= step < iterations * accumulation
    # The same number of device iterations, in calls that are not interrupted.
    other, again, one = make_trainer(1, accumulation, kind, stages)
    again.compile(one)
    assert again.rng_state[0] == seed
    num_done = step // accumulation
    assert num_done > 0 or iterations == 1
    for _ in range(num_done):
        again(one)
    for name, value in state_of(net).items():
        if "num_batches" not in name:
            assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("iterations, accumulation", [(100_000, 4), (1, 400_000)])
def test_ctrl_c_leaves_a_counter_with_what_counts(iterations, accumulation):
    net, model, x = make_trainer(iterations, accumulation, plain_sgd, momentum=None)
    model.compile(x)
    interrupted(model, x)
    assert net.norm.num_batches_tracked == model.rng_state[1]


def test_a_call_behind_an_interrupted_one_goes_on_from_there():
    net, model, x = make_trainer(40_000, 2, combined_sgd)
    model.compile(x)
    interrupted(model, x)
    step = model.rng_state[1]
    assert 0 < step < 80_000
    model(x)
    assert model.rng_state[1] == step + 80_000
    other, again, one = make_trainer(1, 2, combined_sgd)
    again.compile(one)
    for _ in range(step // 2 + 40_000):
        again(one)
    for name, value in state_of(net).items():
        if "num_batches" not in name:
            assert torch.equal(value, other.state_dict()[name]), name


@pytest.mark.parametrize("stages", [(0, 0), (0, 1)])
def test_inference_ends_behind_the_micro_batches_in_flight(stages):
    count = 1_000_000
    model = poptorch.inferenceModel(Net(stages=stages).train(), make_options(count))
    x = torch.zeros(1, 4).expand(count * 2, 4).contiguous()
    model.compile(x)
    assert interrupted(model, x) < 1.0
    step = model.rng_state[1]
    assert 0 < step < count
    # Its running statistics are those after this number of micro-batches.
    one = poptorch.inferenceModel(Net(stages=stages).train(), make_options(step))
    one(x[: 2 * step])
    names = [n for n in dict(model.model.named_buffers()) if "num_batches" not in n]
    states = []
    for executor in (model, one):
        executor.copyWeightsToHost()
        states.append({name: executor.model.get_buffer(name).clone() for name in names})
    assert all(torch.equal(states[0][name], states[1][name]) for name in names)


def test_anchors_of_an_interrupted_call_are_not_read():
    net = Net()
    options = make_options(100_000)
    options.anchorTensor("out", "second/Gemm:0", poptorch.OutputMode.Final)
    model = poptorch.trainingModel(net, options, plain_sgd(net))
    x = torch.randn(400_000, 4)
    model.compile(x)
    interrupted(model, x)
    with pytest.raises(poptorch.Error, match=r"'out' is not complete: the last call"):
        model.getAnchoredTensor("out")
    out, _ = model(x)
    assert torch.equal(model.getAnchoredTensor("out"), out)


def test_other_signals_have_their_handlers_run_while_the_model_runs():
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(time.monotonic()))
    try:
        _, model, x = make_trainer(20_000, 2, plain_sgd)
        model.compile(x)
        start = time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, 0.15)
        model(x)
        end = time.monotonic()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert model.rng_state[1] == 40_000
    if end - start > 0.5:
        assert came and came[0] - start < 0.5


def test_what_a_handler_raises_comes_out_of_the_call():
    class Alarm(Exception):
        pass

    def ring(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        _, model, x = make_trainer(400_000, 1, plain_sgd)
        model.compile(x)
        with pytest.raises(Alarm):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            model(x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_wakeup_descriptor_is_left_as_it_was():
    _, model, x = make_trainer(10_000, 1, plain_sgd)
    model(x)
    assert signal.set_wakeup_fd(-1) == -1


def test_a_run_is_stopped_by_another_thread():
    _, model, x = make_trainer(400_000, 1, plain_sgd)
    model.compile(x)
    executable = model.compiled.executable
    assert not executable.stop()  # there is no run
    outcome = []

    def run():
        try:
            model(x)
        except poptorch.Error as error:
            outcome.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    while executable.num_runs == 0:
        time.sleep(0.001)
    time.sleep(0.05)
    start = time.monotonic()
    assert executable.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert time.monotonic() - start < 1.0
    assert "stopped after" in outcome[0]
    assert "of 400000 device iterations" in outcome[0]
    assert not executable.stop()
    with _native.translated_errors():
        assert 0 < executable.step < 400_000
