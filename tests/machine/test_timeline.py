"""The time of a program: slots by schedule, links, updates, replicas, the host."""

import math

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import _native
from popsim_torch.enums import PipelineSchedule
from tests.options import make_options
from tests.unit.executor.nets import Function, Net, batch, train
from tests.unit.executor.pipelined import wrap

Default, Sequential = PipelineSchedule.Default, PipelineSchedule.Sequential
Grouped, Interleaved = PipelineSchedule.Grouped, PipelineSchedule.Interleaved
SCHEDULES = (Default, Grouped, Interleaved, Sequential)
GA = 24  # a multiple of what all schedules keep in flight, for two to four stages
SYNC = next(one.value for one in _native.machine_constants() if one.name == "sync")


def pipeline(num_stages, schedule=Default, **settings):
    executor, x = wrap(num_stages, ga=GA, schedule=schedule, **settings)
    return executor.estimate(x)


def slots_of(estimate):
    return [slot for one in estimate.stretches for _ in range(one.times) for slot in one.slots]


def work_of(estimate):
    """Return the cycles of forward and of backward, by stage."""
    work = {"forward": {}, "backward": {}}
    for slot in slots_of(estimate):
        for action in slot.actions:
            if action.kind != "update":
                work[action.kind][action.stage] = action.cycles
    return work["forward"], work["backward"]


def links_of(estimate):
    return sum(slot.link_cycles for slot in slots_of(estimate))


def without_links(estimate):
    return estimate.update_cycles - links_of(estimate) - estimate.weight_update_cycles


# --- Schedules ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_a_pipeline_takes_as_long_as_its_slowest_ipu_in_each_cycle(num_stages):
    found = pipeline(num_stages)
    forward, backward = work_of(found)
    last = 2 * num_stages - 2

    def cycle(time):
        def busy(stage):
            runs_forward = stage <= time < stage + GA
            runs_backward = last - stage <= time < last - stage + GA
            return runs_forward * forward[stage] + runs_backward * backward[stage]

        return max(map(busy, range(num_stages)))

    wanted = sum(map(cycle, range(GA + last)))
    assert without_links(found) == pytest.approx(wanted)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_grouped_passes_wait_for_each_other(num_stages):
    found = pipeline(num_stages, Grouped)
    forward, backward = work_of(found)
    last = 2 * num_stages - 1
    stages = range(num_stages)

    def cycle(time):
        ahead = [forward[one] for one in stages if one <= time < one + GA]
        back = [backward[one] for one in stages if last - one <= time < last - one + GA]
        return max(ahead, default=0) + max(back, default=0)

    assert without_links(found) == pytest.approx(sum(map(cycle, range(GA + last))))
    whole = (GA + num_stages - 1) * (max(forward.values()) + max(backward.values()))
    ramps = 2 * (num_stages - 1) * (max(forward.values()) + max(backward.values()))
    assert whole - ramps <= without_links(found) <= whole * (1 + 1e-9)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_interleaved_slots_are_as_long_as_the_longest_pass(num_stages):
    found = pipeline(num_stages, Interleaved)
    longest = max(max(work.values()) for work in work_of(found))
    assert without_links(found) == pytest.approx((2 * GA + 2 * num_stages - 2) * longest)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_a_sequential_schedule_takes_the_sum(num_stages):
    found = pipeline(num_stages, Sequential)
    forward, backward = work_of(found)
    every = sum(forward.values()) + sum(backward.values())
    assert without_links(found) == pytest.approx(GA * every)
    crossings = [slot.link_cycles for slot in slots_of(found) if slot.link_cycles]
    assert len(crossings) == GA * 2 * (num_stages - 1)


@pytest.mark.parametrize("d", [3, 9])
def test_inference_fills_the_pipeline_once(d):
    executor, x = wrap(3, d=d, training=False)
    found = executor.estimate(x)
    forward, _ = work_of(found)

    def cycle(time):
        return max(cycles for stage, cycles in forward.items() if stage <= time < stage + d)

    assert without_links(found) == pytest.approx(sum(map(cycle, range(d + 2))))
    assert without_links(found) <= (d + 2) * max(forward.values()) * (1 + 1e-9)


@pytest.mark.parametrize("schedule", [Default, Grouped])
def test_a_pipeline_is_between_its_slowest_stage_and_no_pipeline(schedule):
    found = pipeline(4, schedule)
    forward, backward = work_of(found)
    both = [forward[stage] + backward[stage] for stage in forward]
    ramps = 2 * (len(both) - 1) * (max(forward.values()) + max(backward.values()))
    assert GA * max(both) <= without_links(found) <= GA * sum(both) + ramps


def test_stages_on_one_ipu_add_up():
    found = pipeline(3, ipus=(0, 1, 0))
    forward, backward = work_of(found)
    full = max(found.stretches, key=lambda one: one.times).slots
    (slot,) = full
    both = {0: 0.0, 1: 0.0}
    for stage, ipu in enumerate((0, 1, 0)):
        both[ipu] += forward[stage] + backward[stage]
    assert slot.cycles - slot.link_cycles == pytest.approx(max(both.values()))
    assert [one.stages for one in found.ipus] == [(0, 2), (1,)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_use_of_an_ipu_is_its_share_of_the_time(schedule):
    found = pipeline(3, schedule)
    forward, backward = work_of(found)
    updates = {action.ipu: action.cycles for action in slots_of(found)[-1].actions}
    for one in found.ipus:
        busy = GA * (forward[one.ipu] + backward[one.ipu]) + updates[one.ipu]
        assert one.busy_cycles == pytest.approx(busy)
        assert one.use == pytest.approx(busy / found.update_cycles)
        assert 0 < one.use <= 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_parts_of_a_call_add_up_on_every_ipu(schedule):
    found = pipeline(3, schedule, d=2)
    for one in found.ipus:
        parts = vars(one.parts)
        assert sum(parts.values()) == pytest.approx(found.call_cycles)
        assert min(parts.values()) >= 0


def test_a_call_repeats_the_update():
    few, many = (pipeline(3, d=d) for d in (1, 5))
    assert many.update_cycles == pytest.approx(few.update_cycles, rel=0.02)
    assert many.call_cycles - few.call_cycles == pytest.approx(
        5 * many.update_cycles - few.update_cycles
    )
    assert few.call_cycles - few.update_cycles == 80_000 + 83_000  # the round trip of the host


def test_what_crosses_takes_the_sync_of_all_ipus_and_the_time_of_its_bytes():
    found = pipeline(3)
    clock = found.device.clock_hz
    sync = 600 + 2 * 15e-9 * clock  # there and back, one hop between three IPUs
    for link in found.links:
        rate = 54.4e9 if link.source // 2 == link.target // 2 else 27.2e9
        assert link.cycles == pytest.approx(sync + link.bytes / rate * clock)
    assert {(one.source, one.target) for one in found.links} == {(0, 1), (1, 2), (1, 0), (2, 1)}


# --- Replicas -----------------------------------------------------------------------------------


def replicated(replicas, model=None):
    model = model or Net()
    options = make_options(1, 2).replicationFactor(replicas)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.estimate(model, batch(4 * replicas), options=options, optimizer=optimizer)


def test_one_replica_adds_up_nothing():
    found = replicated(1)
    assert found.all_reduce_cycles == 0
    assert found.traffic.all_reduces == 0
    assert found.traffic.all_reduce_bytes == 0


@pytest.mark.parametrize(
    ("replicas", "rate"), [(2, 54.4e9), (4, 27.2e9), (16, 27.2e9), (64, 27.2e9)]
)
def test_replicas_add_up_their_gradients(replicas, rate):
    found = replicated(replicas)
    size = 4 * (4 * 5 + 5 + 5 * 3 + 3)
    sent = 2 * (replicas - 1) / replicas * size
    assert found.traffic.all_reduce_bytes == pytest.approx(sent)
    clock = found.device.clock_hz
    wanted = sent / rate * clock + 2 * (replicas - 1) * 600
    assert found.all_reduce_cycles == pytest.approx(wanted)
    assert found.traffic.all_reduces == 1


def test_a_replica_works_on_its_own_items():
    one, four = replicated(1), replicated(4)
    # The host's way is shared, and gradients are added up.
    more = four.update_cycles - one.update_cycles - four.all_reduce_cycles
    assert 0 <= more < 0.01 * one.update_cycles
    assert four.batch.items_per_call == 4 * one.batch.items_per_call


# --- Machines -----------------------------------------------------------------------------------


def on_chip(machine, dtype=torch.half, **settings):
    options = make_options(50).machine(machine, **settings).enableSyntheticData(True)
    model = nn.Sequential(nn.Linear(256, 512, dtype=dtype), nn.GELU())
    return poptorch.estimate(model, torch.zeros(50 * 64, 256, dtype=dtype), options=options)


def test_bow_is_faster_by_its_clock():
    cycles = [[op.cycles for op in on_chip(name).ops] for name in ("mk2", "bow")]
    assert cycles[0] == cycles[1]
    seconds = [
        one.ipus[0].parts.compute / one.device.clock_hz for one in map(on_chip, ("mk2", "bow"))
    ]
    assert seconds[0] / seconds[1] == pytest.approx(1.85 / 1.33)


def test_more_tiles_and_half_precision_are_never_slower():
    cycles = [on_chip("mk2", tiles=tiles).update_cycles for tiles in (8, 64, 256, 512, 1024, 1472)]
    assert cycles == sorted(cycles, reverse=True)
    assert on_chip("mk2").update_cycles < on_chip("mk2", torch.float).update_cycles


def test_the_same_model_costs_the_same_twice():
    assert pipeline(3).as_dict() == pipeline(3).as_dict()
    assert on_chip("bow").as_dict() == on_chip("bow").as_dict()


def test_half_an_addition_by_hand():
    options = poptorch.Options().enableSyntheticData(True)
    x = torch.zeros(1_000_000, dtype=torch.half)
    found = poptorch.estimate(Function(lambda x, y: x + y), (x, x), options=options)
    (op,) = [op for op in found.ops if op.kind == "map"]
    assert (op.compute, op.exchange, op.sync) == (689, 0, SYNC)
    assert op.grade == "A"


# --- The host -----------------------------------------------------------------------------------


def copied(size, **settings):
    options = poptorch.Options()
    for name, value in settings.items():
        getattr(options, name)(value)
    return poptorch.estimate(Function(lambda x: x[:, :1]), torch.zeros(1, size), options=options)


def test_the_data_of_the_host_takes_the_time_of_its_bytes():
    few, many = copied(1_000_000), copied(2_000_000)
    clock = few.device.clock_hz
    more = many.traffic.host_in_bytes - few.traffic.host_in_bytes
    assert more == 4_000_000
    taken = (many.ipus[0].parts.host - few.ipus[0].parts.host) / clock
    rates = [one.value for one in _native.machine_constants() if one.name.startswith("host, data")]
    assert any(taken == pytest.approx(more / rate) for rate in rates)


def test_data_that_the_device_makes_takes_no_time_of_the_host():
    made = copied(1_000_000, enableSyntheticData=True)
    assert made.traffic.host_in_bytes == 0
    assert made.ipus[0].parts.host < copied(1_000_000).ipus[0].parts.host


# --- Loops and values ---------------------------------------------------------------------------


def test_costs_change_no_bit_of_a_run():
    results = []
    for asked in (False, True):
        torch.manual_seed(0)
        x, y = batch(12)
        options = make_options(1, 2, seed=3)
        if asked:
            options.machine("bow", tiles=64).logCycleCount(True)
        net = Net()
        model = train(net, options)
        outputs = [model(x, y) for _ in range(3)]
        if asked:
            assert model.estimate().cycles > 0
            assert model.cycleCount() > 0
        model.copyWeightsToHost()
        results.append([*(one for pair in outputs for one in pair), *net.state_dict().values()])
    assert all(map(torch.equal, *results))


def test_a_loop_costs_its_trips():
    def found(trips):
        def loop(x):
            return poptorch.for_loop(trips, lambda x: torch.cumsum(x, 1), [x])[0]

        options = poptorch.Options().enableSyntheticData(True)
        return poptorch.estimate(Function(loop), torch.zeros(64, 64), options=options).update_cycles

    one, two, nine = found(1), found(2), found(9)
    assert nine - two == pytest.approx(7 * (two - one))
    assert two > one


def test_the_latency_of_a_micro_batch_does_not_exceed_the_call():
    executor, x = wrap(3, d=8, training=False)
    found = executor.estimate(x)
    parts = (found.latency.host_to_ipu, found.latency.compute, found.latency.ipu_to_host)
    assert min(parts) > 0
    assert sum(parts) == pytest.approx(found.latency.round_trip)
    assert found.latency.round_trip < found.seconds


@pytest.mark.parametrize("size", [0, 1, 3])
def test_small_sizes_have_finite_costs(size):
    model = Function(lambda x: (x[:, :size].exp() @ x[:size]).sum())
    found = poptorch.estimate(model, torch.zeros(4, 4))
    assert math.isfinite(found.cycles)
    assert all(0 <= op.cycles < 100_000 for op in found.ops)
