"""``executor.record_timeline()`` and ``executor.timeline()``: when stages worked in a run."""

from itertools import pairwise

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from tests.unit.executor.pipelined import compiled, wrap

pytestmark = pytest.mark.filterwarnings("ignore:The model specifies")
SCHEDULES = list(PipelineSchedule)


@pytest.fixture(params=[1, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def recorded(*args, **kwargs):
    executor, x = wrap(*args, **kwargs)
    executor.compile(x)
    executor.record_timeline()
    executor(x)
    return executor, x


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_has_the_actions_of_its_schedule(schedule, threads):
    executor, _ = recorded(2, ga=8, d=2, schedule=schedule)
    timeline, plan = executor.timeline(), executor.schedule()
    expected = {
        (one.kind, one.stage if one.kind != "update" else None, one.micro_batch, iteration)
        for iteration in range(2)
        for one in plan
        if one.kind != "recompute"
    }
    found = [(one.kind, one.stage, one.micro_batch, one.device_iteration) for one in timeline]
    assert len(found) == len(expected) and set(found) == expected
    lanes = len(set(executor.compiled.executable.plan.lane_of_stage))
    assert timeline.num_threads == (lanes if threads > 1 else 1)
    assert plan.timeline is not None and list(plan.timeline) == list(timeline)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_times_follow_the_dependencies(schedule, threads):
    timeline = recorded(3, ga=12, d=2, schedule=schedule)[0].timeline()
    at = {(o.kind, o.stage, o.micro_batch, o.device_iteration): o for o in timeline}
    for (kind, stage, number, iteration), one in at.items():
        assert 0 <= one.begin <= one.end <= timeline.seconds
        if kind == "forward" and stage:
            assert at["forward", stage - 1, number, iteration].end <= one.begin
        if kind == "backward":
            earlier = ("backward", stage + 1) if stage < 2 else ("forward", stage)
            assert at[(*earlier, number, iteration)].end <= one.begin
        if kind == "update":
            assert at["backward", 0, 11, iteration].end <= one.begin
        if iteration and kind == "forward":
            assert at["update", None, None, iteration - 1].end <= one.begin
    # A thread does one thing at a time.
    for thread in range(timeline.num_threads):
        own = [one for one in timeline if one.thread == thread]
        assert all(a.end <= b.begin for a, b in pairwise(own))


def test_inference_counts_device_iterations(threads):
    timeline = recorded(2, d=6, training=False, schedule=PipelineSchedule.Grouped)[0].timeline()
    assert sorted((o.stage, o.micro_batch, o.device_iteration) for o in timeline) == [
        (stage, number, number) for stage in range(2) for number in range(6)
    ]
    assert "Backward" in str(timeline) and timeline.stages[0].backward == 0


def test_shares_come_from_the_times_of_actions():
    timeline = recorded(2)[0].timeline()
    for stage, time in enumerate(timeline.stages):
        own = [one for one in timeline if one.stage == stage]
        assert time.busy == pytest.approx(sum(one.seconds for one in own))
        forward = [one.seconds for one in own if one.kind == "forward"]
        assert time.forward == pytest.approx(sum(forward) / 8)
        assert timeline.use[stage] == pytest.approx(time.busy / timeline.seconds)
        shares = timeline.use[stage], timeline.idle[stage], timeline.update
        assert sum(shares) == pytest.approx(1) and min(shares) > 0
    assert [one.begin for one in timeline] == sorted(one.begin for one in timeline)
    assert str(timeline).splitlines()[0].split()[:2] == ["Stage", "Thread"]


def test_the_latest_run_is_kept():
    executor, x = recorded(2)
    first = executor.timeline()
    executor(x)
    assert list(executor.timeline()) != list(first)
    executor.record_timeline(False)
    executor(x)
    with pytest.raises(poptorch.Error, match=r"timeline: no complete run.*record_timeline\(\)"):
        executor.timeline()
    assert executor.schedule().timeline is None


def test_recording_changes_no_bit():
    plain, x = wrap(2, d=3)
    other = recorded(2, d=3)[0]
    other.destroy()
    other, _ = wrap(2, d=3)
    other.compile(x)
    other.record_timeline()
    assert torch.equal(plain(x), other(x))
    plain.destroy()
    other.destroy()
    for one, two in zip(plain.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, two)


class Failing(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4, 2)

    def forward(self, x):
        return poptorch.identity_loss(self.table(x), "sum")


def test_a_failed_run_has_no_timeline():
    model = Failing()
    training = poptorch.trainingModel(
        model, poptorch.Options(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    training.compile(torch.tensor([1]))
    training.record_timeline()
    training(torch.tensor([1]))
    assert len(training.timeline()) == 3
    with pytest.raises(poptorch.Error):
        training(torch.tensor([7]))
    with pytest.raises(poptorch.Error, match="no complete run"):
        training.timeline()
    training(torch.tensor([2]))
    assert len(training.timeline()) == 3


def test_mistakes_are_explained():
    executor, _ = wrap(2)
    for method in (executor.record_timeline, executor.timeline, executor.stages):
        with pytest.raises(poptorch.Error, match="the model has not been compiled"):
            method()
    large, _ = wrap(1, ga=1, d=6 * 10**6, schedule=PipelineSchedule.Sequential)
    large.compile(torch.zeros(12 * 10**6, 6))
    with pytest.raises(poptorch.Error, match="fewer device iterations"):
        large.record_timeline()


def test_a_loop_of_a_function_shows_its_pipeline():
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    infeed = poptorch.InfeedQueue([torch.randn(2, 4) for _ in range(48)])

    @poptorch.function
    def train():
        poptorch.pipeline(
            [first, lambda x: poptorch.identity_loss(second(x), "sum")],
            8,
            3,
            infeed_queue=infeed,
            optimizer_function=lambda loss: (optimizer, loss),
            outfeed_queue=poptorch.OutfeedQueue(),
            outfeed_loss=True,
        )

    train()
    (program,) = train.programs
    assert program.schedule().name == "Grouped" and program.schedule().repeats == 3
    program.record_timeline()
    train()
    assert len(program.timeline()) == 3 * (2 * 2 * 8 + 1)
    assert [row.parameters for row in program.stages()] == [20, 10]
    infeed.close()


def test_a_profile_does_not_disturb_the_timeline():
    executor, x = recorded(2)
    executor.profile(x)
    assert executor.timeline().num_threads == 1  # a profile runs on one thread
    assert compiled(2).schedule().timeline is None


@pytest.mark.parametrize("num_stages", [1, 2])
def test_replicas_have_times_of_their_own(num_stages, threads):
    training, _ = recorded(num_stages, ga=4, d=2, replicas=3, schedule=PipelineSchedule.Grouped)
    timeline = training.timeline()
    assert timeline.num_replicas == 3
    passes = {
        (one.kind, one.stage, one.replica, one.device_iteration, one.micro_batch)
        for one in timeline
        if one.kind != "update"
    }
    assert len(passes) == 2 * num_stages * 3 * 2 * 4 and len(timeline) == len(passes) + 2
    for thread in range(timeline.num_threads):
        own = [one for one in timeline if one.thread == thread]
        assert all(a.end <= b.begin for a, b in pairwise(own))
    assert max(timeline.use) <= 1 and (threads > 1 or timeline.num_threads == 1)
    figure = training.schedule().plot()
    assert len(figure.axes[1].get_yticks()) == 3 * num_stages
