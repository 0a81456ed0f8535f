"""``executor.schedule()``: the plan of a pipeline as data, as a grid, and as a picture."""

import sys

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.stages import pipeline_use
from tests.unit.executor.pipelined import compiled, wrap

pytestmark = pytest.mark.filterwarnings("ignore:The model specifies")
Grouped, Interleaved = PipelineSchedule.Grouped, PipelineSchedule.Interleaved
Sequential, Default = PipelineSchedule.Sequential, PipelineSchedule.Default

GRIDS = {
    Grouped: """\
time    0  1  2     3        4     5     6     7
stage 0 F0 F1 F2    F3 R0 B0 R1 B1 R2 B2 R3 B3 U
stage 1    F0 F1 B0 F2 B1    F3 B2 B3          U""",
    Interleaved: """\
time    0  1  2  3     4  5     6  7     8  9     10
stage 0 F0    F1 R0 B0 F2 R1 B1 F3 R2 B2    R3 B3 U
stage 1    F0 B0 F1    B1 F2    B2 F3    B3       U""",
    Sequential: """\
time    0  1  2  3  4  5  6  7  8  9  10 11 12 13 14 15 16
stage 0 F0       B0 F1       B1 F2       B2 F3       B3 U
stage 1    F0 B0       F1 B1       F2 B2       F3 B3    U""",
    Default: """\
time    0  1     2        3        4     5     6
stage 0 F0 F1    R0 B0 F2 R1 B1 F3 R2 B2 R3 B3 U
stage 1    F0 B0 F1 B1    F2 B2    F3 B3       U""",
}


@pytest.mark.parametrize("kind", GRIDS)
def test_the_grid_shows_what_each_stage_does_at_each_time(kind):
    schedule = compiled(2, ga=4, schedule=kind).schedule()
    title, _, *grid = schedule.text(width=58).splitlines()
    assert title == f"{kind.name}, training: 2 stages, 4 micro-batches per weight update"
    assert "\n".join(line for line in grid[:-2] if line) == GRIDS[kind]
    assert str(schedule) == repr(schedule)


def test_inference_has_forward_passes_of_all_device_iterations():
    schedule = compiled(3, d=6, schedule=Grouped, training=False).schedule()
    assert not schedule.training and schedule.num_slots == 8 and len(schedule) == 18
    assert {one.kind for one in schedule} == {"forward"}
    assert schedule.text().startswith("Grouped, inference: 3 stages, 6 micro-batches\n")
    assert [str(one) for one in schedule.at(2)] == ["F0", "F1", "F2"]


def test_a_schedule_repeats_for_each_device_iteration():
    schedule = compiled(2, ga=4, d=3).schedule()
    assert (schedule.repeats, schedule.num_micro_batches) == (3, 4)
    assert "3 updates in a call" in schedule.text()


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 5, 8])
def test_each_stage_runs_each_micro_batch_once(kind, num_stages):
    count = 2 * num_stages * 2
    schedule = compiled(num_stages, ga=count, schedule=kind).schedule()
    slots = {}
    for one in schedule:
        slots[one.kind, one.stage, one.micro_batch] = one.slot
    for stage in range(num_stages):
        for number in range(count):
            forward, backward = (slots[kind, stage, number] for kind in ("forward", "backward"))
            assert forward <= backward
            if stage:
                assert slots["forward", stage - 1, number] < forward
                assert backward < slots["backward", stage - 1, number]
            if stage in schedule.recomputes:
                assert slots["recompute", stage, number] == backward
        assert slots["update", stage, None] == schedule.num_slots - 1
    assert len(schedule) == len(slots)


@pytest.mark.parametrize("kind", GRIDS)
def test_indexing_agrees_with_iteration(kind):
    schedule = compiled(2, ga=100, schedule=kind).schedule()
    everything = list(schedule)
    assert len(schedule) == len(everything)
    assert [schedule[i] for i in range(len(schedule))] == everything
    assert schedule[-1] == everything[-1] and schedule[5:9] == everything[5:9]
    for slot in range(schedule.num_slots):
        assert schedule.at(slot) == [one for one in everything if one.slot == slot]
        assert schedule.at(slot, stage=1) == [one for one in schedule.at(slot) if one.stage == 1]
    with pytest.raises(IndexError, match="no action"):
        schedule[len(schedule)]


@pytest.mark.parametrize("kind", GRIDS)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_its_use_is_that_of_pipeline_use(kind, num_stages):
    schedule = compiled(num_stages, ga=16, schedule=kind).schedule()
    expected = pipeline_use(num_stages, 16, PipelineSchedule[schedule.name])
    assert schedule.use == pytest.approx([expected] * num_stages)


def test_stages_on_one_ipu_take_turns():
    schedule = compiled(3, ga=12, schedule=Grouped, ipus=[0, 1, 0]).schedule()
    assert schedule.ipus == (0, 1, 0)
    assert schedule.labels == ["stage 0, IPU 0", "stage 1, IPU 1", "stage 2, IPU 0"]
    assert schedule.use == pytest.approx([0.5] * 3)  # IPU 0 always works, for both of its stages


def test_stages_one_after_another_have_the_sequential_schedule():
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    options.Training.gradientAccumulation(2)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = poptorch.BeginBlock(torch.nn.Linear(3, 3), ipu_id=0)
            self.b = poptorch.BeginBlock(torch.nn.Linear(3, 3), ipu_id=1)

        def forward(self, x):
            return poptorch.identity_loss(self.b(self.a(x)), "sum")

    model = Model()
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    training.compile(torch.randn(2, 3))
    assert training.schedule().name == "Sequential"
    assert [str(one) for one in training.schedule()][:4] == ["F0", "F0", "B0", "B0"]


def test_a_long_schedule_shows_its_steady_part_once():
    schedule = compiled(2, ga=1000).schedule()
    text = schedule.text(width=80)
    assert len(text.splitlines()) < 12 and "F999" in text and "B999" in text
    head = next(line for line in text.splitlines() if "..." in line)
    assert "x996" in text and head.split()[:5] == ["time", "0", "1", "2", "..."]
    full = schedule.text(full=True, width=10**6)
    assert full.splitlines()[2].split()[1:] == [str(i) for i in range(schedule.num_slots)]


def test_a_million_micro_batches_take_no_time():
    executor, _ = wrap(2, ga=10**6)
    executor.compile(torch.zeros(2 * 10**6, 6))
    schedule = executor.schedule()
    assert "x999996" in schedule.text()
    assert schedule[-3].micro_batch == 999999 and schedule.at(-2, 0)[-1].micro_batch == 999999
    assert 0.99 < schedule.use[0] < 1 and "100%" not in schedule.text()


def test_wide_grids_continue_below():
    lines = compiled(4, ga=8, schedule=Grouped).schedule().text(width=60).splitlines()
    assert max(map(len, lines)) <= 78  # only the sentences below the grid are longer
    assert sum(line.startswith("time") for line in lines) > 1
    assert all(len(line) <= 60 for line in lines if line.startswith(("time", "stage")))


def test_mistakes_are_explained():
    executor, _ = wrap(2)
    with pytest.raises(poptorch.Error, match=r"schedule: the model has not been compiled.*Call it"):
        executor.schedule()
    schedule = compiled(2).schedule()
    with pytest.raises(ValueError, match=r"Schedule.at: slot is 99; .*Pass -\d+ to \d+"):
        schedule.at(99)
    with pytest.raises(ValueError, match=r"Schedule.at: stage is 2; .*Pass 0 to 1"):
        schedule.at(0, 2)
    with pytest.raises(TypeError, match=r"Schedule.at: slot is 'x'\. Pass an int"):
        schedule.at("x")
    with pytest.raises(ValueError, match=r"Schedule.text: width is 3\. Pass an int, 40 or more"):
        schedule.text(width=3)


def test_a_loaded_model_has_the_schedule_of_the_saved_one(tmp_path):
    saved = compiled(2, ga=4, schedule=Grouped, ipus=[1, 0])
    saved.save(tmp_path / "model.poptorch")
    expected, stages = saved.schedule(), saved.stages()
    saved.destroy()
    loaded = poptorch.load(tmp_path / "model.poptorch")
    assert loaded.schedule() == expected
    assert loaded.stages() == stages


def boxes(axes):
    """Return the number of boxes of a panel, by colour."""
    return sum(len(one.get_paths()) for one in axes.collections)


def test_the_picture_has_a_box_for_each_action(tmp_path):
    pytest.importorskip("matplotlib")
    executor, x = wrap(2, ga=4, d=2, schedule=Grouped)
    executor.compile(x)
    schedule = executor.schedule()
    path = tmp_path / "plan.png"
    figure = schedule.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG") and len(figure.axes) == 1
    assert boxes(figure.axes[0]) == len(schedule)
    labels = {text.get_text() for text in figure.axes[0].texts}
    assert {str(one) for one in schedule} <= labels

    executor.record_timeline()
    executor(x)
    planned, ran = executor.schedule().plot().axes
    assert boxes(planned) == len(schedule)
    assert boxes(ran) == 4 * 2 * 2 + 2  # of one device iteration; an update on both stages
    assert "device iteration 1" in ran.get_title(loc="left")


def test_without_matplotlib_the_picture_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    schedule = compiled(2).schedule()
    with pytest.raises(poptorch.Error, match=r"plot: matplotlib .*pip install matplotlib"):
        schedule.plot()
