"""The memory of a program: by hand, by schedule, by option."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.machine.parts import verdict_of
from tests.machine.test_timeline import pipeline
from tests.options import make_options
from tests.unit.executor.nets import Function, Net, batch

CONTROL = 24 * 1024 + 6 * 16  # bytes of code that any program has, and of the random state
WITH_EXCHANGE, WITHOUT = 400, 150  # bytes of the code of an op


def one_tile(**settings):
    return poptorch.Options().machine(tiles=1, out_of_memory="ignore", **settings)


def purposes(found, purpose, ipu=None):
    return [one for one in found.variables if one.purpose == purpose and ipu in (None, one.ipu)]


# --- By hand ------------------------------------------------------------------------------------


def test_a_chain_by_hand():
    def chain(x):
        a = torch.softmax(x, -1)
        b = torch.cumsum(a, 1)
        c = torch.cumsum(b.t().contiguous(), 1)
        return c.sum()

    found = poptorch.estimate(Function(chain), torch.zeros(8, 64), options=one_tile())
    assert [op.kind for op in found.ops] == ["softmax", "cumsum", "cumsum", "reduce", "anchor"]
    x, total = 8 * 64 * 4, 8  # the sum takes a word of 8 bytes
    code = CONTROL + 2 * WITH_EXCHANGE + 2 * WITHOUT
    always = code + x + total  # x and the result wait for the host
    temporaries = [op.temporary_bytes for op in found.ops]
    assert temporaries == [x, 0, 0, x, 0]
    live = [x + x, x + x, x + x, x + total + x, total]
    memory = found.ipus[0].memory
    assert [(op, worst - always) for op, worst, _ in memory.liveness] == list(enumerate(live))
    assert memory.always == always
    assert memory.peak == always + max(live)
    assert memory.peak_op == 3
    assert memory.tiles == [memory.peak]
    assert memory.classes["code"] == (code, code)
    assert memory.classes["streams"][0] == x + total
    assert memory.classes["activations"][0] == x + total
    assert memory.classes["temporaries"][0] == x


def test_classes_and_variables_of_training_add_up():
    net = nn.Linear(8, 4)
    model = Function(lambda x: poptorch.identity_loss(net(x), "mean"))
    model.net = net
    options = one_tile()
    options.Training.gradientAccumulation(2)
    optimizer = torch.optim.Adam(net.parameters())
    found = poptorch.estimate(model, torch.zeros(4, 8), options=options, optimizer=optimizer)
    memory = found.ipus[0].memory
    weights = (8 * 4 + 4) * 4
    assert memory.classes["parameters"][1] == weights
    assert memory.classes["accumulators"][1] == weights
    assert 2 * weights <= memory.classes["state"][1] <= 2 * weights + 64  # and the counts of steps
    assert sum(worst for worst, _ in memory.classes.values()) == memory.peak
    always = [one for one in found.variables if one.first_op is None]
    assert sum(one.bytes_per_tile * one.copies for one in always) == memory.always


def test_the_peak_is_that_of_the_variables_that_live_together():
    net = Net()
    options = one_tile()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    found = poptorch.estimate(net, batch(32), options=options, optimizer=optimizer)
    memory = found.ipus[0].memory
    for op, worst, mean in memory.liveness:
        live = [
            one.bytes_per_tile * one.copies
            for one in found.variables
            if one.first_op is None or one.first_op <= op <= one.last_op
        ]
        assert worst == mean == sum(live) + found.ops[op].temporary_bytes
    assert memory.peak == max(worst for _, worst, _ in memory.liveness)


@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "Adam", "LAMB"])
def test_the_state_of_an_optimizer(optimizer):
    net = nn.Linear(64, 64, bias=False)
    model = Function(lambda x: poptorch.identity_loss(net(x), "mean"))
    model.net = net
    weights = list(net.parameters())
    makers = {
        "SGD": (0, lambda: torch.optim.SGD(weights, lr=0.1)),
        "momentum": (1, lambda: torch.optim.SGD(weights, lr=0.1, momentum=0.9)),
        "Adam": (2, lambda: torch.optim.Adam(weights)),
        "LAMB": (2, lambda: poptorch.optim.LAMB(weights)),
    }
    copies, make = makers[optimizer]
    found = poptorch.estimate(model, torch.zeros(2, 64), options=one_tile(), optimizer=make())
    large = [one for one in purposes(found, "state") if one.bytes == 64 * 64 * 4]
    assert len(large) == copies
    assert not purposes(found, "accumulators")  # one micro-batch: its gradient is a value


# --- Schedules ----------------------------------------------------------------------------------

DEPTHS = {
    PipelineSchedule.Default: lambda num, stage: 2 * (num - 1 - stage) + 1,
    PipelineSchedule.Grouped: lambda num, stage: 2 * (num - 1 - stage),
    PipelineSchedule.Interleaved: lambda num, stage: num - 1 - stage,
    PipelineSchedule.Sequential: lambda num, stage: 0,
}


@pytest.mark.parametrize("schedule", DEPTHS)
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_stages_keep_the_copies_of_their_schedule(schedule, num_stages):
    found = pipeline(num_stages, schedule)
    wanted = {stage: DEPTHS[schedule](num_stages, stage) for stage in range(num_stages - 1)}
    kept = {}
    for one in found.stash:
        kept.setdefault(one.stage, set()).add(one.copies)
    assert kept == {stage: {copies} for stage, copies in wanted.items() if copies}
    for one in purposes(found, "stash"):
        assert one.bytes == 2 * 6 * 4  # of one copy


def test_inference_keeps_no_copies():
    executor_like = Function(lambda x: x.exp())
    options = poptorch.Options().deviceIterations(8)
    found = poptorch.estimate(executor_like, torch.zeros(16, 4), options=options)
    assert found.stash == ()


# --- Options ------------------------------------------------------------------------------------


class Deep(nn.Module):
    def __init__(self, depth=6, width=64):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if self.training and index == len(self.layers) // 2:
                x = poptorch.recomputationCheckpoint(x)
        return poptorch.identity_loss(x, "mean")


def deep(mode=0, size=2048, optimizer=torch.optim.SGD, replicas=1, locations=None, tiles=64):
    net = Deep()
    options = make_options(1, 2).machine(tiles=tiles, out_of_memory="ignore")
    options._Popart.set("autoRecomputation", mode)
    options.replicationFactor(replicas)
    if locations is not None:
        options.TensorLocations.setOptimizerLocation(locations)
    made = optimizer(net.parameters(), lr=0.1)
    x = torch.zeros(2 * size * replicas, 64)
    return poptorch.estimate(net, x, options=options, optimizer=made)


def test_recomputation_takes_less_memory_and_at_most_a_forward_pass_more():
    plain, again = deep(), deep(mode=4)
    assert any(op.recomputed for op in again.ops)
    assert again.peak_bytes < plain.peak_bytes
    forward = sum(op.cycles for op in plain.ops if op.phase == "forward")
    count = plain.batch.gradient_accumulation
    assert 0 < again.update_cycles - plain.update_cycles <= count * forward


def test_state_off_the_chip_leaves_the_tiles_and_takes_time():
    away = poptorch.TensorLocationSettings().useOnChipStorage(False)
    here, there = deep(optimizer=torch.optim.Adam), deep(optimizer=torch.optim.Adam, locations=away)
    state = 2 * 6 * (64 * 64 + 64) * 4
    assert here.ipus[0].memory.classes["state"][1] >= state
    # One buffer for the largest update is left, and small things such as counts of steps.
    assert there.ipus[0].memory.classes["state"][1] < state / 3
    assert there.traffic.off_chip_bytes == pytest.approx(2 * state, rel=0.01)
    assert here.traffic.off_chip_bytes == 0
    seconds = 2 * state / (38.4e9 / 4)
    more = there.weight_update_cycles - here.weight_update_cycles
    assert more == pytest.approx(seconds * here.device.clock_hz, rel=0.01)


def test_state_shared_by_replicas_is_divided():
    def state_of(count):
        shared = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
        shared.minElementsForReplicatedTensorSharding(1)
        found = deep(optimizer=torch.optim.Adam, replicas=count, locations=shared, size=64)
        return sum(one.bytes for one in purposes(found, "state") if one.shape == (64, 64))

    assert state_of(1) == 2 * 6 * 64 * 64 * 4
    assert state_of(4) == state_of(1) / 4


def test_a_lower_proportion_takes_no_more_temporary_memory():
    def largest(share):
        options = poptorch.Options().machine(out_of_memory="ignore")
        options.setAvailableMemoryProportion({"IPU0": share})
        x = torch.zeros(4096, 1024)
        return poptorch.estimate(nn.Linear(1024, 4096), x, options=options)

    found = [largest(share) for share in (0.02, 0.05, 0.1, 0.3, 0.6, 1.0)]
    temporary = [max(op.temporary_bytes for op in one.ops) for one in found]
    cycles = [one.update_cycles for one in found]
    assert temporary == sorted(temporary)
    assert cycles == sorted(cycles, reverse=True)
    assert temporary[0] < temporary[-1]


def test_io_tiles_hold_what_comes_from_the_host():
    options = poptorch.Options().machine(tiles=128)
    options.TensorLocations.numIOTiles(32)
    options.deviceIterations(2)
    x = torch.zeros(2 * 256, 64)
    found = poptorch.estimate(nn.Linear(64, 64), x, options=options)
    assert found.device.io_tiles == 32
    (entry,) = [one for one in purposes(found, "streams") if one.name == "input"]
    assert entry.tiles == 32
    assert entry.bytes_per_tile == 256 * 64 * 4 / 32
    memory = found.ipus[0].memory
    assert min(memory.always_tiles[96:]) - min(memory.always_tiles[:96]) >= entry.bytes_per_tile
    for one in found.variables:
        assert one.purpose in ("streams", "code") or one.tiles <= 96


@pytest.mark.parametrize(
    ("peak", "verdict"),
    [(0, "fits"), (850, "fits"), (851, "close"), (1150, "close"), (1151, "does not fit")],
)
def test_verdicts(peak, verdict):
    assert verdict_of(peak, 1000) == verdict


def test_the_verdict_of_a_program_is_that_of_its_fullest_ipu():
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4096))
    net[1] = poptorch.BeginBlock(net[1], ipu_id=1)
    options = poptorch.Options().deviceIterations(2).machine(tiles=4, out_of_memory="ignore")
    found = poptorch.estimate(net, torch.zeros(2 * 256, 16), options=options)
    assert [one.memory.verdict for one in found.ipus] == ["fits", "does not fit"]
    assert found.verdict == "does not fit"
    assert found.peak_bytes == found.ipus[1].memory.peak
