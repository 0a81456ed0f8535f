"""``set_pipelining_options`` and ``set_gradient_accumulation_options``."""

import inspect

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import MeanReductionStrategy, OutputMode, PipelineSchedule, ReductionType
from popsim_torch.errors import Error, UsageAttributeError, UsageTypeError, UsageValueError
from popsim_torch.options import Options
from tests.options import make_options

Method, Mode = poptorch.GradientAccumulationReductionMethod, poptorch.RecomputationMode
pipelining = poptorch.set_pipelining_options
accumulation = poptorch.set_gradient_accumulation_options


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("POPTORCH_DEFAULT_OPTIONS", raising=False)


# What follows for options


def test_count_schedule_and_reduction():
    options = Options()
    pipelining(options, 8)
    assert options.Training.gradient_accumulation == 8
    assert options.pipeline_schedule == PipelineSchedule.Grouped
    training = options.Training
    assert training.accumulation_and_replication_reduction_type == ReductionType.Sum


@pytest.mark.parametrize(
    "method, kind, strategy",
    [
        (Method.SUM, ReductionType.Sum, MeanReductionStrategy.Post),
        (Method.MEAN, ReductionType.Mean, MeanReductionStrategy.Post),
        (Method.RUNNING_MEAN, ReductionType.Mean, MeanReductionStrategy.Running),
    ],
)
@pytest.mark.parametrize("function", [pipelining, accumulation])
def test_reductions(function, method, kind, strategy):
    options = Options()
    function(options, 8, gradient_accumulation_reduction_method=method)
    training = options.Training
    assert training.accumulation_and_replication_reduction_type == kind
    assert training.meanAccumulationAndReplicationReductionStrategy == strategy


def test_devices():
    options = Options()
    pipelining(options, 4, device_mapping=(1, 0))
    assert [stage.ipu_id for stage in options.execution_strategy.stages] == [1, 0]


def test_outputs_add_up():
    options = Options()
    pipelining(options, 4, accumulate_outfeed=True)
    assert options.output_mode == OutputMode.Sum
    options = Options()
    pipelining(options, 4, accumulate_outfeed=False)
    assert options.defaultOutputMode()


@pytest.mark.parametrize(
    "name, place, stored",
    [
        ("offload_activations", "location_activation", {"onChip": 0}),
        ("offload_weights", "location_weight", {"onChip": 0}),
        ("offload_weight_update_variables", "location_optimizer", {"onChip": 0}),
        ("offload_gradient_accumulation_buffers", "location_accumulator", {"onChip": 0}),
        ("replicated_weight_sharding", "location_weight", {"useReplicatedTensorSharding": 1}),
        (
            "replicated_optimizer_state_sharding",
            "location_optimizer",
            {"useReplicatedTensorSharding": 1},
        ),
    ],
)
def test_hints_about_memory_are_those_of_options(name, place, stored):
    options = Options()
    settings = pipelining(options, 4, **{name: True})
    assert options.TensorLocations.toDict() == {place: stored}
    line = next(line for line in settings.explain().splitlines() if line.startswith(name))
    assert "hint" in line and "no effect on values" in line


@pytest.mark.parametrize("mode", [Mode.RecomputeThenBackpropagate, Mode(2)])
def test_recomputation(mode):
    options = Options()
    pipelining(options, 4, recomputation_mode=mode)
    assert options._Popart.options["autoRecomputation"] == 3
    options = Options()
    pipelining(options, 4, recomputation_mode=Mode.Auto)
    assert "autoRecomputation" not in options._Popart.options


def test_a_count_that_the_options_have_will_do():
    options = Options()
    options.Training.gradientAccumulation(6)
    pipelining(options, pipeline_schedule=PipelineSchedule.Interleaved)
    assert options.Training.gradient_accumulation == 6
    accumulation(options, 3)
    assert options.Training.gradient_accumulation == 3


def test_every_option_is_explained():
    for function in (pipelining, accumulation):
        names = set(inspect.signature(function).parameters) - {"target"}
        text = function(Options(), 4).explain()
        assert {line.split()[0] for line in text.splitlines()} == names
    assert "in effect: an update every 4 micro-batches" in text
    assert "in effect: gradients are added up" in text


def test_the_explanation_knows_the_devices():
    text = pipelining(Options(), 8, device_mapping=[1, 0]).explain()
    assert "in effect: stage 0 on IPU 1, stage 1 on IPU 0" in text
    assert "in effect: 4 micro-batches are in flight" in text


# What is refused


NO_COUNT = (
    "Grouped needs gradient_accumulation_steps_per_replica.*2 n for n",
    "Interleaved needs .* a multiple of n for n",
)


@pytest.mark.parametrize(
    "given, error, message",
    [
        ({}, UsageValueError, NO_COUNT[0]),
        ({"pipeline_schedule": PipelineSchedule.Interleaved}, UsageValueError, NO_COUNT[1]),
        ({"gradient_accumulation_steps_per_replica": 0}, UsageValueError, "=0. Pass 1 or more"),
        ({"gradient_accumulation_steps_per_replica": 2.0}, UsageTypeError, "=2.0. Pass an int"),
        ({"gradient_accumulation_steps_per_replica": True}, UsageTypeError, "Pass an int"),
        ({"device_mapping": 3}, UsageTypeError, "device_mapping=3. Pass a list"),
        ({"device_mapping": "01"}, UsageTypeError, "device_mapping='01'. Pass a list"),
        ({"device_mapping": [0, "1"]}, UsageTypeError, "Pass a list with an int each"),
        ({"device_mapping": []}, UsageValueError, "Pass the IPU of each stage"),
        ({"device_mapping": [0, -1]}, UsageValueError, "0 or more"),
        ({"device_mapping": [0, 1, 2]}, Error, "multiple of 6.* is 4. Set it to 6"),
        (
            {"device_mapping": [0, 0], "pipeline_schedule": PipelineSchedule.Interleaved},
            Error,
            "stages 0 and 1 are both on IPU 0",
        ),
        ({"accumulate_outfeed": 1}, UsageTypeError, "accumulate_outfeed=1"),
        (
            {"gradient_accumulation_reduction_method": "sum"},
            UsageTypeError,
            "Use one of GradientAccumulationReductionMethod.SUM",
        ),
        ({"pipeline_schedule": 0}, UsageTypeError, "Use one of PipelineSchedule.Grouped"),
        ({"recomputation_mode": True}, UsageTypeError, "Use one of RecomputationMode.Auto"),
        (
            {
                "recomputation_mode": Mode.RecomputeThenBackpropagate,
                "pipeline_schedule": PipelineSchedule.Sequential,
            },
            UsageValueError,
            "RecomputeThenBackpropagate does not go with PipelineSchedule.Sequential",
        ),
        (
            {
                "recomputation_mode": Mode.RecomputeAndBackpropagateInterleaved,
                "pipeline_schedule": PipelineSchedule.Interleaved,
            },
            UsageValueError,
            "does not go with PipelineSchedule.Interleaved",
        ),
        (
            {"gradient_accumulation_dtype": torch.int32},
            UsageTypeError,
            "gradients are accumulated in torch.float32 or torch.float16, got torch.int32",
        ),
        ({"accumulate_outfeed_dtype": torch.half}, Error, "not supported"),
        ({"offload_weights": 1}, UsageTypeError, "offload_weights=1. Pass True, False or None"),
        ({"batch_serialization_iterations": 2}, Error, "not supported.*Leave it at 1"),
        ({"batch_serialization_iterations": 0}, UsageValueError, "Pass 1 or more"),
        ({"continuous_weight_updates": True}, Error, "not supported.*Leave it at False"),
        (
            {"forward_propagation_stages_poplar_options": {}},
            UsageTypeError,
            "a dict for each stage",
        ),
        ({"weight_update_poplar_options": []}, UsageTypeError, "Pass a dict"),
        (
            {"backward_propagation_stages_poplar_options": [{}], "device_mapping": [0, 1]},
            UsageValueError,
            "has 1 dicts, and device_mapping 2 stages",
        ),
    ],
)
def test_what_is_refused_at_once(given, error, message):
    options = Options()
    before = repr(options)
    if message not in NO_COUNT:
        given = {"gradient_accumulation_steps_per_replica": 4, **given}
    with pytest.raises(error, match=message):
        pipelining(options, **given)
    assert repr(options) == before


def test_frozen_options():
    with pytest.raises(UsageAttributeError, match="can't modify frozen options"):
        pipelining(Options().freeze(), 4)


def test_an_output_mode_that_does_not_add_up():
    options = Options().outputMode(OutputMode.All)
    with pytest.raises(
        UsageValueError, match=r"Options.outputMode has set OutputMode.All, and the"
    ):
        pipelining(options, 4, accumulate_outfeed=True)
    assert options.Training.gradient_accumulation == 1


@pytest.mark.parametrize("function", [pipelining, accumulation])
def test_what_has_no_options(function):
    with pytest.raises(UsageTypeError, match=r"got a int. Pass a torch.nn.Module or a"):
        function(3, 4)
    executor = poptorch.inferenceModel(nn.ReLU(), make_options())
    with pytest.raises(UsageTypeError, match="wrapped already, and its options are frozen"):
        function(executor, 4)


# Models


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))

    def forward(self, x):
        return poptorch.identity_loss(self.layers(x).square(), "mean")


def trained(model, options, calls=2):
    """Return the loss of the last call, the weights, and the executor."""
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    torch.manual_seed(1)
    x = torch.randn(2 * executor.options.Training.gradient_accumulation, 4)
    for _ in range(calls):
        loss = executor(x)
    executor.copyWeightsToHost()
    return loss, [weight.detach().clone() for weight in model.parameters()], executor


@pytest.mark.parametrize("schedule", [PipelineSchedule.Grouped, PipelineSchedule.Interleaved])
def test_a_model_runs_as_was_set_on_it(schedule):
    model = Model()
    poptorch.set_pipeline_stage_assignment(model.layers, [0, 0, 1])
    pipelining(model, 4, [1, 0], pipeline_schedule=schedule)
    options = make_options()
    loss, weights, executor = trained(model, options)
    assert options.Training.gradient_accumulation == 1
    assert executor.options.Training.gradient_accumulation == 4
    start = {"Grouped": "0F0 1F0 0F1 1F1 0F2 1B0", "Interleaved": "0F0 1F0 1B0 0F1 0B0 1F1"}
    assert executor.compiled.executable.actions().startswith(start[schedule.name])

    plain = Model()
    accumulation(plain, 4)
    expected_loss, expected, _ = trained(plain, make_options())
    assert torch.equal(loss, expected_loss)
    assert all(map(torch.equal, weights, expected))

    eager = Model()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    torch.manual_seed(1)
    x = torch.randn(8, 4)
    for _ in range(2):
        optimizer.zero_grad()
        sum(eager.layers(part).square().mean() for part in x.split(2)).backward()
        optimizer.step()
    for weight, found in zip(eager.parameters(), weights, strict=True):
        torch.testing.assert_close(found, weight.detach())


def test_inference_takes_devices_and_schedule_alone():
    model = Model().eval()
    poptorch.set_pipeline_stage_assignment(model.layers, [0, 0, 1])
    pipelining(model, 8, [1, 0], accumulate_outfeed=True)
    inference = poptorch.inferenceModel(model, make_options(4))
    x = torch.randn(4, 4)
    expected = sum(model(part) for part in x.split(1))
    torch.testing.assert_close(inference(x), expected.detach())
    assert inference.options.Training.gradient_accumulation == 1
    assert inference.compiled.executable.actions().startswith("0F0 1F0 0F1")


def test_options_that_say_something_else():
    model = Model()
    pipelining(model, 4)
    with pytest.raises(
        UsageValueError, match=r"gradientAccumulation has set 8, and .* 4. Leave one"
    ):
        trained(model, make_options(1, 8))
    other = make_options(1, 4).pipelineSchedule(PipelineSchedule.Sequential)
    with pytest.raises(
        UsageValueError, match=r"pipelineSchedule has set PipelineSchedule.Sequential"
    ):
        trained(model, other)
    assert not other._is_frozen or other.Training.gradient_accumulation == 4


def test_a_later_call_replaces_an_earlier_one():
    model = Model()
    pipelining(model, 4)
    accumulation(model, 3, Method.MEAN)
    options = trained(model, make_options(), calls=1)[2].options
    assert options.Training.gradient_accumulation == 3
    assert options.pipeline_schedule == PipelineSchedule.Default


@pytest.mark.parametrize("mapping", [[0], [0, 1, 2], [0, 1, 2, 3]])
def test_a_mapping_of_another_length(mapping):
    model = Model()
    poptorch.set_pipeline_stage_assignment(model.layers, [0, 0, 1])
    pipelining(model, 24, mapping)
    with pytest.raises(
        Error, match=r"stages have a device.*device_mapping of set_pipelining_options"
    ):
        trained(model, make_options())


def test_two_stages_can_share_a_device():
    model = Model()
    poptorch.set_pipeline_stage_assignment(model.layers, [0, 0, 1])
    pipelining(model, 4, [0, 0])
    plain = Model()
    accumulation(plain, 4)
    assert torch.equal(trained(model, make_options())[0], trained(plain, make_options())[0])
