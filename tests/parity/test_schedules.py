"""Every schedule gives the bits of the model without stages: outputs, weights, statistics."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error
from tests.options import make_options

MICRO_BATCH, GA, D, CALLS = 2, 12, 2, 2
STAGES = {1: [0] * 7, 2: [0, 0, 0, 0, 1, 1, 1], 3: [0, 0, 1, 1, 1, 1, 2], 4: [0, 1, 1, 1, 2, 2, 3]}
SCHEDULES = [schedule for schedule in PipelineSchedule if schedule != PipelineSchedule.Default]
pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """Layers with running statistics and random numbers, and a loss."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Sequential(
            nn.Linear(4, 8),
            nn.BatchNorm1d(8),
            nn.ReLU(),
            nn.Dropout(0.3),
            nn.Linear(8, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        )
        self.layers = layers.to(dtype)

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out.float(), y)


def options_for(schedule, ga):
    """Return options for several calls' worth of micro-batches."""
    options = make_options(D, ga, seed=3)
    options.outputMode(poptorch.OutputMode.All).autoRoundNumIPUs(True)
    if schedule is not None:
        options.pipelineSchedule(schedule)
    return options


def train(stages, schedule, dtype=torch.float32, recompute=None, ga=GA):
    """Return the outputs of some calls, and the state of the model after them."""
    model = Model(dtype)
    poptorch.set_pipeline_stage_assignment(model.layers, stages)
    options = options_for(schedule, ga)
    if recompute is not None:
        options._Popart.set("autoRecomputation", recompute)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    size = MICRO_BATCH * D * ga
    torch.manual_seed(1)
    x, y = torch.randn(size, 4).to(dtype), torch.randint(0, 3, (size,))
    outputs = [output for _ in range(CALLS) for output in training(x, y)]
    training.copyWeightsToHost()
    return outputs, dict(model.state_dict()), training


def same(one, other):
    """Whether two trainings agree in every bit."""
    return all(map(torch.equal, one[0], other[0])) and all(
        torch.equal(one[1][name], value) for name, value in other[1].items()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_has_the_bits_of_one_stage(schedule, num_stages, dtype):
    assert same(train(STAGES[num_stages], schedule, dtype), train(STAGES[1], None, dtype))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_stages_without_recomputation(schedule):
    found = train(STAGES[4], schedule, recompute=0, ga=16)
    assert same(found, train(STAGES[1], None, recompute=0, ga=16))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inference_has_the_bits_of_one_stage(schedule):
    model = Model().eval()
    x, y = torch.randn(12, 4), torch.randint(0, 3, (12,))
    expected = poptorch.inferenceModel(model, make_options(6))(x, y)
    poptorch.set_pipeline_stage_assignment(model.layers, STAGES[2])
    options = make_options(6).pipelineSchedule(schedule)
    found = poptorch.inferenceModel(model, options)(x, y)
    assert all(map(torch.equal, found, expected))
    assert torch.allclose(found[0], model(x, y)[0], atol=1e-6)


def slots(schedule, num_stages):
    """Return the numbers of copies that tensors between actions have."""
    executable = train(STAGES[num_stages], schedule, recompute=0)[2].compiled.executable
    return {place.num_slots for place in executable.plan.arena_ranges()}


def test_stashes_are_as_deep_as_the_schedule_says():
    """The queues of stage i hold 2 (n-1-i) or n-1-i; beside them come what is written and read."""
    assert {2 * (2 - stage) + 2 for stage in range(3)} <= slots(PipelineSchedule.Grouped, 3)
    assert max(slots(PipelineSchedule.Grouped, 3)) == 6
    assert {2 - stage + 1 for stage in range(3)} <= slots(PipelineSchedule.Interleaved, 3)
    assert max(slots(PipelineSchedule.Interleaved, 3)) == 3
    assert slots(PipelineSchedule.Sequential, 3) == {1}


def actions(schedule):
    """Return the order in which two stages run."""
    return train(STAGES[2], schedule)[2].compiled.executable.actions()


def test_the_option_chooses_the_order():
    assert actions(PipelineSchedule.Grouped).startswith("0F0 1F0 0F1 1F1 0F2 1B0")
    assert actions(PipelineSchedule.Interleaved).startswith("0F0 1F0 1B0 0F1 0B0 1F1")
    assert actions(PipelineSchedule.Sequential).startswith("0F0 1F0 1B0 0B0 0F1")
    assert actions(None) == actions(PipelineSchedule.Default)


# What cannot run


def run_two_stages(options, stages=STAGES[2], training=True):
    model = Model()
    poptorch.set_pipeline_stage_assignment(model.layers, stages)
    if not training:
        executor = poptorch.inferenceModel(model.eval(), options)
    else:
        executor = poptorch.trainingModel(
            model, options, torch.optim.SGD(model.parameters(), lr=0.1)
        )
    size = 2 * options.Training.gradient_accumulation * options.device_iterations
    return executor(torch.randn(size, 4), torch.randint(0, 3, (size,)))


@pytest.mark.parametrize(
    "schedule, count, near",
    [
        (PipelineSchedule.Grouped, 6, "4 or 8"),
        (PipelineSchedule.Grouped, 2, "4"),
        (PipelineSchedule.Interleaved, 5, "4 or 6"),
    ],
)
def test_a_count_that_is_no_multiple(schedule, count, near):
    options = make_options(1, count).pipelineSchedule(schedule)
    step = {PipelineSchedule.Grouped: 4, PipelineSchedule.Interleaved: 2}[schedule]
    with pytest.raises(Error) as caught:
        run_two_stages(options)
    text = str(caught.value)
    assert f"PipelineSchedule.{schedule.name} with 2 stages" in text
    assert (
        f"must be a positive multiple of {step}, the micro-batches in flight, and is {count}"
        in text
    )
    assert f"Set it to {near}: " in text
    for name in (
        "Options.Training.gradientAccumulation",
        "gradient_accumulation_steps_per_replica",
        "gradient_accumulation_count",
    ):
        assert name in text


def test_inference_counts_device_iterations():
    options = make_options(5).pipelineSchedule(PipelineSchedule.Grouped)
    with pytest.raises(Error, match=r"of device iterations must be .* 2, .*Set it to 4 or 6"):
        run_two_stages(options, training=False)


def test_the_sequential_schedule_takes_any_count():
    options = make_options(1, 5).pipelineSchedule(PipelineSchedule.Sequential)
    assert len(run_two_stages(options)) == 2


def test_two_stages_on_one_device():
    strategy = poptorch.PipelinedExecution(poptorch.Stage().ipu(0), poptorch.Stage().ipu(0))
    options = make_options(1, 4).setExecutionStrategy(strategy)
    interleaved = options.clone().pipelineSchedule(PipelineSchedule.Interleaved)
    with pytest.raises(Error, match=r"stages 0 and 1 are both on IPU 0.*device_mapping"):
        run_two_stages(interleaved)
    run_two_stages(options.clone().pipelineSchedule(PipelineSchedule.Grouped))
    run_two_stages(options.clone().pipelineSchedule(PipelineSchedule.Sequential))


def test_a_strategy_that_runs_one_stage_at_a_time():
    options = make_options(1, 4).setExecutionStrategy(poptorch.ShardedExecution())
    options.pipelineSchedule(PipelineSchedule.Grouped)
    with pytest.raises(Error, match="runs the stages one after another"):
        run_two_stages(options)


def test_one_stage_needs_no_number_of_micro_batches():
    options = make_options(1, 3).pipelineSchedule(PipelineSchedule.Grouped)
    assert len(run_two_stages(options, [0] * 7)) == 2


def test_a_file_keeps_the_schedule(tmp_path):
    training = train(STAGES[2], PipelineSchedule.Grouped)[2]
    training.save(tmp_path / "model")
    loaded = poptorch.load(tmp_path / "model")
    assert loaded.compiled.executable.actions() == training.compiled.executable.actions()
    assert loaded.options.pipeline_schedule == PipelineSchedule.Grouped
