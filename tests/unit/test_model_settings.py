"""Settings of a model take effect wherever the model is used: each place times each argument."""

import copy
import inspect
import io

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.executor.device_program import DeviceProgram
from popsim_torch.options.pipelining_settings import COMPUTE_HINTS
from tests.options import make_options

Method, Mode = poptorch.GradientAccumulationReductionMethod, poptorch.RecomputationMode
pipelining = poptorch.set_pipelining_options
accumulation = poptorch.set_gradient_accumulation_options
HALF = torch.float16
COUNT, UPDATES, SIZE = 4, 2, 2


class Model(nn.Module):
    def __init__(self, stages=True):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        if stages:
            poptorch.set_pipeline_stage_assignment(self, {"first": 0, "last": 1})

    def forward(self, x):
        return poptorch.identity_loss(self.last(self.first(x).tanh()).square(), "mean")


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.inner = nn.ModuleDict({"model": model})

    def forward(self, x):
        return self.inner["model"](x)


class Held:
    """An object with a model and an optimizer; its method is the body of a loop."""

    def __init__(self, model):
        self.model = model
        self.optimizer = sgd(model)

    def step(self, x):
        loss = self.model(x)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batches():
    generator = torch.Generator().manual_seed(1)
    return list(torch.randn(UPDATES * COUNT, SIZE, 4, generator=generator))


def of_training_model(model):
    executor = poptorch.trainingModel(model, make_options(), sgd(model))
    for update in torch.stack(batches()).reshape(UPDATES, COUNT * SIZE, 4):
        executor(update)
    executor.destroy()


def of_fit(model):
    poptorch.fit(model, batches(), optimizer=sgd(model), verbose=0)


def of_fitted_executor(model):
    executor = poptorch.trainingModel(model, make_options(), sgd(model))
    poptorch.fit(executor, batches(), verbose=0)
    executor.destroy()


def of_repeat(model):
    optimizer, infeed = sgd(model), poptorch.InfeedQueue(batches())

    @poptorch.function
    def train():
        def body(x):
            loss = model(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        poptorch.repeat(UPDATES * COUNT, body, infeed=infeed)

    train()
    train.destroy()
    infeed.close()


def of_method(model):
    held, infeed = Held(model), poptorch.InfeedQueue(batches())

    @poptorch.function
    def train():
        poptorch.repeat(UPDATES * COUNT, held.step, infeed=infeed)

    train()
    train.destroy()
    infeed.close()


def loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def bare(model):
    return model


PLACES = {
    "trainingModel": (of_training_model, bare),
    "trainingModel of a Sequential": (of_training_model, nn.Sequential),
    "trainingModel of a deep copy": (of_training_model, copy.deepcopy),
    "trainingModel of a module": (of_training_model, Wrapper),
    "fit": (of_fit, bare),
    "fit of a Sequential": (of_fit, nn.Sequential),
    "fit of a module": (of_fit, Wrapper),
    "fit of a copy": (of_fit, copy.copy),
    "fit of a deep copy": (of_fit, copy.deepcopy),
    "fit of a deep copy of a module": (of_fit, lambda model: copy.deepcopy(Wrapper(model))),
    "fit of a file": (of_fit, loaded),
    "fit of torch.compile": (of_fit, torch.compile),
    "fit of an executor": (of_fitted_executor, bare),
    "fit of an executor of a module": (of_fitted_executor, Wrapper),
    "repeat": (of_repeat, bare),
    "repeat of a Sequential": (of_repeat, nn.Sequential),
    "repeat of a module": (of_repeat, Wrapper),
    "repeat of a deep copy": (of_repeat, copy.deepcopy),
    "repeat of a method": (of_method, bare),
}

ARGUMENTS = {
    "nothing": (accumulation, {}),
    "sum": (accumulation, {"gradient_accumulation_reduction_method": Method.SUM}),
    "mean": (accumulation, {"gradient_accumulation_reduction_method": Method.MEAN}),
    "running mean": (accumulation, {"gradient_accumulation_reduction_method": Method.RUNNING_MEAN}),
    "type": (accumulation, {"gradient_accumulation_dtype": HALF}),
    "variables": (accumulation, {"offload_weight_update_variables": True}),
    "sharding": (accumulation, {"replicated_optimizer_state_sharding": True}),
    "pipeline": (pipelining, {}),
    "devices": (pipelining, {"device_mapping": [1, 0]}),
    "pipelined mean": (pipelining, {"gradient_accumulation_reduction_method": Method.MEAN}),
    "interleaved": (pipelining, {"pipeline_schedule": PipelineSchedule.Interleaved}),
    "sequential": (pipelining, {"pipeline_schedule": PipelineSchedule.Sequential}),
    "recomputation": (
        pipelining,
        {
            "recomputation_mode": Mode.RecomputeAndBackpropagateInterleaved,
            "pipeline_schedule": PipelineSchedule.Sequential,
        },
    ),
    "pipelined type": (pipelining, {"gradient_accumulation_dtype": HALF}),
    "memory": (
        pipelining,
        {
            "offload_weight_update_variables": True,
            "offload_activations": True,
            "offload_gradient_accumulation_buffers": False,
            "offload_weights": False,
            "replicated_optimizer_state_sharding": True,
            "replicated_weight_sharding": True,
        },
    ),
}


@pytest.fixture
def programs(monkeypatch):
    """The options that programs are compiled with, and the programs' actions, in order."""
    seen = []

    compile_program = DeviceProgram.compile

    def watched(device, request):
        compiled = compile_program(device, request)
        seen.append((request.options, compiled.executable.actions()))
        return compiled

    monkeypatch.setattr(DeviceProgram, "compile", watched)
    return seen


def trained_by_hand(settings):
    """Return the weights after training in PyTorch."""
    model, values = Model(), settings.values
    optimizer = sgd(model)
    mean = values["gradient_accumulation_reduction_method"] != Method.SUM
    for update in torch.stack(batches()).reshape(UPDATES, COUNT, SIZE, 4):
        optimizer.zero_grad()
        for x in update:
            (model.last(model.first(x).tanh()).square().mean() / (COUNT if mean else 1)).backward()
        optimizer.step()
    return [weight.detach() for weight in model.parameters()]


BRIEFLY = ("mean", "devices")
"""What is tried in each place; the first of each kind gets all arguments."""
CASES = [
    (place, argument)
    for place in PLACES
    for argument in ARGUMENTS
    if argument in BRIEFLY or place in ("trainingModel", "fit", "repeat")
]
ACTIONS = {
    PipelineSchedule.Default: "0F0 1F0 1B0 0B0",
    PipelineSchedule.Grouped: "0F0 1F0 0F1 1F1 0F2 1B0",
    PipelineSchedule.Interleaved: "0F0 1F0 1B0 0F1 0B0 1F1",
    PipelineSchedule.Sequential: "0F0 1F0 1B0 0B0 0F1",
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize(("place", "argument"), CASES)
def test_each_argument_acts_in_each_place(place, argument, programs):
    train, moved = PLACES[place]
    function, given = ARGUMENTS[argument]
    # (without stages if there is no pipeline: PopTorch's own pipeline needs more micro-batches)
    model = Model(stages=function is pipelining)
    settings = function(model, COUNT, **given)
    model = moved(model)
    train(model)

    [(options, actions)] = programs
    changes = list(settings.changes(training=True))
    assert changes[0].setter == "Training.gradientAccumulation"
    assert [one.read(options) for one in changes] == [one.value for one in changes]
    if function is pipelining:
        assert actions.startswith(ACTIONS[settings.schedule])
    tolerance = 2e-3 if given.get("gradient_accumulation_dtype") else 1e-5
    weights = [weight.detach() for weight in model.parameters()]
    torch.testing.assert_close(weights, trained_by_hand(settings), rtol=0, atol=tolerance)


def test_the_table_has_every_argument():
    tried = {name for _, given in ARGUMENTS.values() for name in given}
    hints = set(COMPUTE_HINTS)
    refused = {"accumulate_outfeed_dtype", "batch_serialization_iterations"}
    refused |= {"continuous_weight_updates"}
    elsewhere = {"accumulate_outfeed", "gradient_accumulation_steps_per_replica", "target"}
    for function in (pipelining, accumulation):
        names = set(inspect.signature(function).parameters)
        assert names <= tried | hints | refused | elsewhere


# What contradicts


def loop(body, iterations=COUNT, **arguments):
    """Run a body as a loop with random elements."""
    infeed = poptorch.InfeedQueue([torch.ones(SIZE, 4)] * iterations)
    options = arguments.pop("options", None)

    @poptorch.function(options=options)
    def run():
        poptorch.repeat(iterations, body, infeed=infeed, **arguments)

    try:
        run()
        return run.programs[0]._device.options
    finally:
        run.destroy()
        infeed.close()


def step_of(*models):
    """Return a body that trains all models."""
    optimizers = [sgd(model) for model in models]

    def step(x):
        losses = [model(x) for model in models]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()

    return step


def plain(count=None, *arguments, **named):
    """Return a model without stages, with the given settings."""
    model = Model(stages=False)
    if count is not None:
        accumulation(model, count, *arguments, **named)
    return model


def test_a_count_that_the_loop_has_too():
    assert loop(step_of(plain(4)), 8, gradient_accumulation=4).Training.gradient_accumulation == 4
    message = (
        r"repeat set Training\.gradientAccumulation to 2, and the pipelining options of the model "
        r"Model to 4\. A program has only one value: set the same value in both, "
        r"or leave one of the two out\."
    )
    with pytest.raises(UsageValueError, match=message):
        loop(step_of(plain(4)), 8, gradient_accumulation=2)
    with pytest.raises(UsageValueError, match=r"repeat set Training\.gradientAccumulation to 1"):
        loop(step_of(plain(4)), 8, gradient_accumulation=1)


@pytest.mark.parametrize("count", [4, 8])
def test_a_count_of_the_options_of_the_function(count):
    options = make_options(1, count)
    found = loop(step_of(plain()), 8, options=options)
    assert found.Training.gradient_accumulation == count
    assert found.device_iterations == 8 // count
    with pytest.raises(UsageValueError, match=rf"gradientAccumulation has set {count}, and repeat"):
        loop(step_of(plain()), 8, options=options, gradient_accumulation=2)
    with pytest.raises(UsageValueError, match=rf"has set {count}, .* of the model Model 2\. Leave"):
        loop(step_of(plain(2)), 8, options=options)


def test_iterations_that_are_no_multiple():
    message = "repeat: n = 6 is not a multiple of gradient_accumulation = 4. The nearest .* 4 and 8"
    with pytest.raises(UsageValueError, match=message):
        loop(step_of(plain(4)), 6)
    message = (
        "fit: steps_per_epoch = 6 .* is not a multiple of the gradient accumulation of 4 .the "
        "pipelining options of the model.*nearest multiples are 4 and 8"
    )
    model = plain(4)
    with pytest.raises(UsageValueError, match=message):
        poptorch.fit(model, batches()[:6], optimizer=sgd(model))


def test_several_models_of_a_loop():
    """A loop has one count: one model sets it for all, and two counts must be equal."""
    assert loop(step_of(plain(4), plain())).Training.gradient_accumulation == 4
    assert loop(step_of(plain(4), plain(4))).Training.gradient_accumulation == 4
    with pytest.raises(UsageValueError, match=r"Model set Training.* to 4, .* Model to 2\. A prog"):
        loop(step_of(plain(4), plain(2)))
    with pytest.raises(UsageValueError, match=r"accumulationAndReplicationReductionType to Reduc"):
        loop(step_of(plain(4), plain(4, Method.MEAN)))


def test_models_within_models_have_to_agree():
    outer = Wrapper(plain(4))
    accumulation(outer, 2)
    with pytest.raises(UsageValueError, match=r"Wrapper set .* to 2, and .* model Model to 4\. A"):
        poptorch.trainingModel(outer, make_options(), sgd(outer))
    with pytest.raises(UsageValueError, match=r"Wrapper set .* to 2, and .* model Model to 4\. A"):
        poptorch.fit(outer, batches(), optimizer=sgd(outer))


def test_models_that_a_body_does_not_use_have_no_say():
    """The body's object refers to all three models; each body uses one."""

    class Trainer:
        def __init__(self):
            self.four, self.two, self.none = plain(4), plain(2), plain()
            pipelining(self.none, 8, [0, 1, 2, 3])
            self.optimizers = {name: sgd(getattr(self, name)) for name in ("four", "two")}

        def step(self, name, x):
            loss = getattr(self, name)(x)
            self.optimizers[name].zero_grad()
            loss.backward()
            self.optimizers[name].step()

        def train_four(self, x):
            self.step("four", x)

        def train_two(self, x):
            self.step("two", x)

    trainer = Trainer()
    assert loop(trainer.train_four).Training.gradient_accumulation == 4
    options = loop(trainer.train_two)
    assert options.Training.gradient_accumulation == 2
    assert options.pipeline_schedule == PipelineSchedule.Default


def test_a_mapping_of_a_model_that_is_not_used_breaks_nothing():
    other, model = Model(), Model()
    pipelining(other, 8, [0])
    held = Held(model)
    held.other = other
    options = make_options().setExecutionStrategy(poptorch.ShardedExecution())
    assert loop(held.step, options=options).Training.gradient_accumulation == 1


def test_inference_takes_no_count():
    model, outfeed = plain(4), poptorch.OutfeedQueue()

    def look(x):
        with torch.no_grad():
            outfeed.enqueue(model(x))

    assert loop(look, 3).Training.gradient_accumulation == 1
    assert outfeed.dequeue().shape == (3,)
    assert set(poptorch.evaluate(model, batches()[:3], verbose=0)) == {"loss"}
    assert poptorch.predict(model, batches()[:3]).shape == (3,)


def test_inference_takes_devices_and_schedule(programs):
    model = Model()
    pipelining(model, 4, [1, 0])
    poptorch.predict(nn.Sequential(model), batches()[:4])
    [(options, actions)] = programs
    assert actions.startswith("0F0 1F0 0F1")
    assert [stage.ipu_id for stage in options.execution_strategy.stages] == [1, 0]
    message = r"predict: steps_per_execution = 5 does not fit the .* needs a multiple of 2 .*=6"
    with pytest.raises(UsageValueError, match=message):
        poptorch.predict(model, batches()[:5])


def test_one_sum_of_outputs():
    """A loop returns no outputs, so there is no sum of outputs."""
    model = Model()
    pipelining(model, 4, accumulate_outfeed=True)
    message = "the model Model have accumulate_outfeed=True.* leave it out"
    with pytest.raises(UsageValueError, match=message):
        poptorch.fit(model, batches(), optimizer=sgd(model))
    with pytest.raises(UsageValueError, match=message):
        poptorch.predict(model, batches())
    with pytest.raises(UsageValueError, match=message):
        loop(step_of(model))


@pytest.mark.parametrize("mapping", [[0], [0, 1, 2, 3]])
@pytest.mark.parametrize("train", [of_training_model, of_fit, of_repeat])
def test_devices_for_other_stages(train, mapping):
    model = Model()
    pipelining(model, 8, mapping)
    message = rf"{len(mapping)} stages have a device.*device_mapping of set_pipelining_options"
    with pytest.raises(Error, match=message):
        train(model)


def test_pipelines_of_functions():
    model, outfeed = Model(), poptorch.OutfeedQueue()
    pipelining(model, 4, [1, 0])
    optimizer, infeed = sgd(model), poptorch.InfeedQueue(batches())

    def train_with(**given):
        @poptorch.function
        def train():
            poptorch.pipeline(
                [model.first, lambda x: model.last(x.tanh()).square().mean()],
                given.pop("count", 4),
                infeed_queue=infeed,
                outfeed_queue=outfeed,
                optimizer_function=lambda loss: (optimizer, loss),
                **given,
            )

        train()
        return train.programs[0]._device.options

    assert train_with(device_mapping=[1, 0]).Training.gradient_accumulation == 4
    assert [stage.ipu_id for stage in train_with().execution_strategy.stages] == [1, 0]
    whose = "pipelining options of poptorch.pipeline set"
    with pytest.raises(UsageValueError, match=rf"{whose} Training.gradientAccumulation to 8, .* 4"):
        train_with(count=8)
    with pytest.raises(UsageValueError, match=rf"{whose} setExecutionStrategy"):
        train_with(device_mapping=[0, 1])
    with pytest.raises(UsageValueError, match=rf"{whose} pipelineSchedule"):
        train_with(pipeline_schedule=PipelineSchedule.Interleaved)
    with pytest.raises(UsageValueError, match=rf"{whose} Training.accumulationAndReplication"):
        train_with(reduction_method=Method.MEAN)
    infeed.close()


def test_loops_as_long_as_a_condition_holds():
    model = plain(4)
    step = step_of(model)

    def body(i):
        step(torch.ones(SIZE, 4))
        return i + 1

    @poptorch.function
    def run():
        return poptorch.while_loop(lambda i: i < 3, body, [torch.tensor(0)])

    with pytest.raises(UsageValueError, match=r"while_loop set Training.* to 1, and .* Model to 4"):
        run()


# When it is set


def test_setting_anew_between_calls(programs):
    model = plain(4)
    step = step_of(model)
    infeed = poptorch.InfeedQueue([torch.ones(SIZE, 4)] * 12)

    @poptorch.function
    def run():
        poptorch.repeat(4, step, infeed=infeed)

    run()
    accumulation(plain(), 2)  # of another model
    run()
    assert len(programs) == 1
    accumulation(model, 2)
    run()
    counts = [options.Training.gradient_accumulation for options, _ in programs]
    assert counts == [4, 2]
    run.destroy()
    infeed.close()


@pytest.mark.parametrize("called", [False, True])
def test_setting_behind_training_model(called):
    model = plain(4)
    executor = poptorch.trainingModel(model, make_options(), sgd(model))
    with pytest.raises(UsageTypeError, match="the model is wrapped already, and its options are"):
        accumulation(model, 2)
    executor.destroy()
    wrapper = Wrapper(plain())
    executor = poptorch.trainingModel(wrapper, make_options(), sgd(wrapper))
    if called:
        executor(torch.ones(SIZE, 4))
    accumulation(wrapper.inner["model"], 2)
    with pytest.raises(UsageValueError, match="model Model were set after trainingModel, which"):
        executor(torch.ones(SIZE, 4))


def test_training_and_inference_of_one_model():
    model = plain()
    inference = poptorch.inferenceModel(model, make_options())
    accumulation(model, 4)
    of_training_model(model)
    expected = model(torch.ones(SIZE, 4)).detach()
    torch.testing.assert_close(inference(torch.ones(SIZE, 4)), expected)


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_setting_behind_inference_model(part, called):
    model = Model()
    inference = poptorch.inferenceModel(model, make_options(2))
    if called:
        inference(torch.ones(2 * SIZE, 4))
    pipelining(model.first if part else model, COUNT, device_mapping=[1, 0])
    message = r"were set after inferenceModel, which had already copied .* before inferenceModel\."
    with pytest.raises(UsageValueError, match=message):
        inference(torch.ones(2 * SIZE, 4))


def test_a_schedule_of_the_options_is_shown_by_name():
    model = Model()
    pipelining(model, 4, pipeline_schedule=PipelineSchedule.Interleaved)
    options = make_options().pipelineSchedule(PipelineSchedule.Grouped)
    message = r"pipelineSchedule has set PipelineSchedule\.Grouped, and .* PipelineSchedule\.Inter"
    with pytest.raises(UsageValueError, match=message):
        poptorch.trainingModel(model, options, sgd(model))


def test_fit_speaks_of_itself_in_what_its_loop_refuses():
    model = plain()
    hidden = plain(4)
    model.hidden = [hidden]  # not in a part of the module that fit can find
    model.forward = lambda x: Model.forward(model, x) + hidden(x)
    data = [torch.ones(SIZE, 4)] * 4
    optimizer = torch.optim.SGD([*model.parameters(), *hidden.parameters()], lr=0.1)
    with pytest.raises(UsageValueError, match=r"^fit set Training\.gradientAccumulation to 1, and"):
        poptorch.fit(model, data, optimizer=optimizer, verbose=0)
    model = Model()
    pipelining(model, 4, accumulate_outfeed=True)
    with pytest.raises(UsageValueError, match=r"^fit: the pipelining options of the model Model"):
        poptorch.fit(model, data, optimizer=sgd(model), verbose=0)
