"""Stages that threads of their own run give the bits of one thread, and end as one thread does."""

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from tests.forks import run_forked
from tests.options import make_options

GA, D, MICRO_BATCH = 48, 2, 3
SCHEDULES = [s for s in PipelineSchedule if s not in (PipelineSchedule.Default,)]
PIPELINED = [s for s in SCHEDULES if s != PipelineSchedule.Sequential]
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """Eight layers: a table, running statistics, random numbers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Embedding(10, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 8),
            nn.Tanh(),
            nn.Dropout(0.25),
            nn.Linear(8, 8),
            nn.GELU(),
            nn.Linear(8, 3),
        )

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out, y)


def stages_of(count: int) -> list[int]:
    return [layer * count // 8 for layer in range(8)]


def data(seed=1, calls=2, num_rows=10):
    torch.manual_seed(seed)
    size = MICRO_BATCH * D * GA
    return [
        (torch.randint(0, num_rows, (size,)), torch.randint(0, 3, (size,))) for _ in range(calls)
    ]


def wrap(model, num_stages, schedule, training=True):
    options = make_options(D if training else D * GA, GA if training else 1, seed=3)
    options.outputMode(poptorch.OutputMode.All).autoRoundNumIPUs(True)
    options.pipelineSchedule(schedule)
    options.anchorTensor("sum", "Gradient___layers.2.weight", output_mode=poptorch.OutputMode.Sum)
    poptorch.set_pipeline_stage_assignment(model.layers, stages_of(num_stages))
    if not training:
        options.anchored_tensors.clear()
        return poptorch.inferenceModel(model, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return poptorch.trainingModel(model, options, optimizer)


def results(num_stages, schedule):
    model = Model()
    training = wrap(model, num_stages, schedule)
    found = [tensor for x, y in data() for tensor in training(x, y)]
    found.append(training.getAnchoredTensor("sum"))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    training.destroy()
    return [*found, *state.values()]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", PIPELINED)
def test_lanes_give_the_bits_of_one_thread(schedule, num_stages, threads):
    threads(1)
    expected = results(num_stages, schedule)
    threads(num_stages)
    model = Model()
    training = wrap(model, num_stages, schedule)
    training.compile(*data()[0])
    lanes = training.compiled.executable.plan.lane_of_stage
    assert lanes == list(range(num_stages))
    training.destroy()
    for found, one in zip(results(num_stages, schedule), expected, strict=True):
        assert torch.equal(found, one)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_fewer_threads_than_stages_share_them(num_threads, threads, monkeypatch):
    monkeypatch.setenv("POPSIM_STAGE_THREADS", str(num_threads))
    threads(4)
    model = Model()
    training = wrap(model, 4, PipelineSchedule.Interleaved)
    training.compile(*data()[0])
    lanes = training.compiled.executable.plan.lane_of_stage
    assert len(set(lanes)) == num_threads and lanes == sorted(lanes)
    training.destroy()
    found = results(4, PipelineSchedule.Interleaved)
    threads(1)
    for one, other in zip(found, results(4, PipelineSchedule.Interleaved), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("schedule", PIPELINED)
def test_inference_gives_the_bits_of_one_thread(schedule, threads):
    found = []
    for num_threads in (1, 4):
        threads(num_threads)
        inference = wrap(Model().eval(), 4, schedule, training=False)
        found.append([tensor for x, y in data() for tensor in inference(x, y)])
        assert len(set(inference.compiled.executable.plan.lane_of_stage)) > 1
        inference.destroy()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def queue_results(num_threads, threads):
    """Train with queues, which a value of each stage goes to; return what came out."""
    threads(num_threads)
    model = Model()
    first, second = model.layers[:4], model.layers[4:]
    torch.manual_seed(1)
    elements = [(torch.randint(0, 10, (5,)), torch.randint(0, 3, (5,))) for _ in range(2 * GA)]
    infeed = poptorch.InfeedQueue(elements)
    losses, hidden = poptorch.OutfeedQueue(), poptorch.OutfeedQueue()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def one(x, y):
        x = first(x)
        hidden.enqueue(x)
        return x, y

    def two(x, y):
        return nn.functional.cross_entropy(second(x), y)

    @poptorch.function(options=make_options().randomSeed(3).autoRoundNumIPUs(True))
    def train():
        poptorch.pipeline(
            [one, two],
            GA,
            2,
            infeed_queue=infeed,
            outfeed_queue=losses,
            optimizer_function=lambda loss: (optimizer, loss),
            outfeed_loss=True,
        )

    train()
    lanes = train.programs[0].compiled.executable.plan.lane_of_stage
    found = [losses.dequeue(), hidden.dequeue(), *model.state_dict().values()]
    found = [tensor.detach().clone() for tensor in found]
    train.destroy()
    return lanes, found


def test_queues_get_the_bits_of_one_thread(threads):
    (_, expected), (lanes, found) = queue_results(1, threads), queue_results(2, threads)
    assert lanes == [0, 1]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class Tables(nn.Module):
    """A table on each of some stages: an index that is too large fails there."""

    def __init__(self, num_stages):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(10, 4) for _ in range(num_stages))

    def forward(self, indices):
        total = 0
        for stage, table in enumerate(self.tables):
            poptorch.Block.start(f"stage{stage}", ipu_id=stage)
            total = total + table(indices[:, stage])
        return total, poptorch.identity_loss(total.square(), "mean")


def tables(num_stages):
    options = make_options(2, 16).autoRoundNumIPUs(True)
    options.outputMode(poptorch.OutputMode.All)
    model = Tables(num_stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, options, optimizer)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "wrong", [[(0, 0)], [(2, 5)], [(1, 31)], [(2, 9), (0, 10)], [(2, 20), (1, 20)]]
)
def test_an_index_that_is_too_large_fails_as_on_one_thread(wrong, threads):
    torch.manual_seed(1)
    good = torch.randint(0, 10, (32, 3))
    bad = good.clone()
    for stage, micro_batch in wrong:
        bad[micro_batch, stage] = 10 + stage
    told = []
    for num_threads in (1, 3):
        threads(num_threads)
        training = tables(3)
        training(good)
        before = threading.active_count()
        with pytest.raises(poptorch.Error) as caught:
            training(bad)
        after_error = {n: v.clone() for n, v in training.state_dict().items()}
        out, loss = training(good)
        assert threading.active_count() == before
        told.append((str(caught.value), after_error, out, loss))
        training.destroy()
    (one, state, out, loss), (other, other_state, other_out, other_loss) = told
    assert one == other
    assert torch.equal(out, other_out) and torch.equal(loss, other_loss)
    assert all(torch.equal(state[name], other_state[name]) for name in state)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("training", [True, False])
def test_a_run_that_is_stopped_ends_within_moments(training, threads):
    threads(4)
    model = Model()
    options = make_options(20_000, 48) if training else make_options(2_000_000)
    options.autoRoundNumIPUs(True).outputMode(poptorch.OutputMode.Final)
    poptorch.set_pipeline_stage_assignment(model.layers, stages_of(4))
    if training:
        executor = poptorch.trainingModel(
            model, options, torch.optim.SGD(model.parameters(), lr=0.01)
        )
    else:
        executor = poptorch.inferenceModel(model.eval(), options)
    x = torch.zeros(2 * 48 * 20_000 if training else 2_000_000, dtype=torch.int64)
    executor.compile(x, x)
    executable = executor.compiled.executable
    assert len(set(executable.plan.lane_of_stage)) == 4
    stopped = []

    def stop():
        while not executable.stop():
            time.sleep(0.01)
        stopped.append(time.monotonic())

    timer = threading.Timer(0.5, stop)
    timer.start()
    with pytest.raises(Exception, match="stopped after"):
        executor(x, x)
    ended = time.monotonic()
    timer.join()
    assert ended - stopped[0] < 2


def num_threads_now() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_the_threads_end_with_the_program(threads):
    threads(8)
    results(8, PipelineSchedule.Interleaved)  # OpenMP and PyTorch start theirs
    gc.collect()
    before = num_threads_now()
    model = Model()
    training = wrap(model, 8, PipelineSchedule.Interleaved)
    training(*data()[0])
    during = num_threads_now()
    training.destroy()
    del training
    gc.collect()
    assert during == before + 7
    assert num_threads_now() == before


PROGRAM = """
import os, sys
import torch
import popsim_torch as poptorch
from tests.parity.test_lanes import PipelineSchedule, data, Model, wrap
torch.set_num_threads(4)
model = Model()
training = wrap(model, 4, PipelineSchedule.Interleaved)
_, loss = training(*data()[0])
if sys.argv[1] == "fork":
    child = os.fork()
    if child == 0:
        training.destroy()
        os._exit(7)
    _, status = os.waitpid(child, 0)
    print("child", os.waitstatus_to_exitcode(status))
    _, loss = training(*data()[0])
print("loss", loss[0].item())
"""


@pytest.mark.timeout(100)
@pytest.mark.parametrize("how", ["exit", "fork"])
def test_a_process_ends_with_threads_that_wait(how, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [Path(__file__).parents[2]]))}
    done = run_forked([str(tmp_path / "program.py"), how], cwd=tmp_path, env=env, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "loss" in done.stdout and ("child 7" in done.stdout) == (how == "fork")


@pytest.mark.parametrize(
    ("widths", "lanes"), [([64, 4, 4, 4], [0, 1, 1, 1]), ([4, 4, 4, 64], [0, 0, 0, 1])]
)
def test_stages_are_divided_by_their_work(widths, lanes, threads, monkeypatch):
    monkeypatch.setenv("POPSIM_STAGE_THREADS", "2")
    threads(2)
    layers = [nn.Sequential(nn.Linear(4, w), nn.ReLU(), nn.Linear(w, 4)) for w in widths]
    model = nn.Sequential(*layers)
    poptorch.set_pipeline_stage_assignment(model, [0, 1, 2, 3])
    inference = poptorch.inferenceModel(model, make_options(8).autoRoundNumIPUs(True))
    inference.compile(torch.ones(64, 4))
    assert inference.compiled.executable.plan.lane_of_stage == lanes


@pytest.mark.parametrize("alone", ["host", "checks", "sharded"])
def test_what_needs_the_callers_thread_has_one_lane(alone, threads):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.host = poptorch.CPU(self.double, "double")

        def double(self, x):
            return 2 * x

        def forward(self, x):
            for stage, layer in enumerate(self.layers):
                poptorch.Block.start(f"stage{stage}", ipu_id=stage)
                x = layer(x)
                if alone == "host":
                    x = self.host(x)
            return x

    threads(2)
    options = make_options(4).autoRoundNumIPUs(True)
    if alone == "checks":
        options.Precision.enableFloatingPointExceptions(True)
    if alone == "sharded":
        options.setExecutionStrategy(poptorch.ShardedExecution())
    inference = poptorch.inferenceModel(Net(), options)
    inference(torch.ones(8, 4))
    assert inference.compiled.executable.plan.lane_of_stage == [0, 0]
