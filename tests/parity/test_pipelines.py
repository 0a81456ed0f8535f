"""``poptorch.pipeline`` against the loop that eager PyTorch programs write."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error, UsageValueError
from popsim_torch.feeds import InfeedQueue, OutfeedMode, OutfeedQueue
from popsim_torch.loops import function, repeat
from popsim_torch.pipelining import pipeline

GA, REPEATS = 12, 2
NUM = GA * REPEATS
SCHEDULES = [schedule for schedule in PipelineSchedule if schedule != PipelineSchedule.Default]
METHOD = poptorch.GradientAccumulationReductionMethod
OPTIONS = poptorch.Options().showCompilationProgressBar(False).autoRoundNumIPUs(True)


class Layers(nn.Module):
    """Three stages' worth of layers."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 8)
        self.third = nn.Linear(8, 3)
        self.to(dtype)

    def stages(self, num=3):
        """Return the layers as functions; all pass a temperature and labels on."""

        def one(t, x, y):
            return t, torch.tanh(self.first(x)), y

        def two(t, x, y):
            return t, torch.tanh(self.second(x)), y

        def three(t, x, y):
            return cross_entropy((self.third(x) * t).float(), y)

        def two_and_three(t, x, y):
            return three(*two(t, x, y))

        return [one, two, three] if num == 3 else [one, two_and_three]

    def loss(self, t, x, y):
        """Return the loss as one function."""
        one, rest = self.stages(2)
        return rest(*one(t, x, y))


def elements(dtype=torch.float32):
    """Return the micro-batches of a call."""
    torch.manual_seed(1)
    return [(torch.randn(5, 4).to(dtype), torch.randint(0, 3, (5,))) for _ in range(NUM)]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def piped(schedule, num_stages=3, dtype=torch.float32, **settings):
    """Train twice with a pipeline; return what came out, and the weights."""
    model = Layers(dtype)
    optimizer, outfeed = sgd(model), OutfeedQueue()
    infeed, stages = InfeedQueue(elements(dtype) * 2), model.stages(num_stages)

    @function(options=OPTIONS)
    def train(temperature):
        pipeline(
            stages,
            GA,
            REPEATS,
            inputs=temperature,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=lambda loss: (optimizer, loss),
            pipeline_schedule=schedule,
            **settings,
        )

    found = []
    for temperature in (0.7, 1.3):
        train(torch.tensor(temperature, dtype=dtype))
        found.append(outfeed.dequeue())
    actions = train.programs[0].compiled.executable.actions()
    weights = [weight.detach().clone() for weight in model.parameters()]
    train.destroy()
    return found, weights, actions


def eager(mean=False):
    """Return the same of the usual loop."""
    model = Layers()
    optimizer, losses = sgd(model), []
    for temperature in (0.7, 1.3):
        data = elements()
        for start in range(0, NUM, GA):
            optimizer.zero_grad()
            for x, y in data[start : start + GA]:
                loss = model.loss(temperature, x, y)
                (loss / GA if mean else loss).backward()
                losses.append(loss.detach())
            optimizer.step()
    return torch.stack(losses), [weight.detach() for weight in model.parameters()]


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_training_is_that_of_the_usual_loop(schedule, num_stages):
    (first, second), weights, _ = piped(schedule, num_stages)
    losses, expected = eager()
    torch.testing.assert_close(torch.cat([first, second]), losses)
    for found, weight in zip(weights, expected, strict=True):
        torch.testing.assert_close(found, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_all_schedules_have_the_bits_of_a_loop_without_stages(dtype):
    model = Layers(dtype)
    optimizer, outfeed, infeed = sgd(model), OutfeedQueue(), InfeedQueue(elements(dtype) * 2)
    options = OPTIONS.clone()
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    # A pipeline's accumulators have the types of the weights.
    options.Training.gradientAccumulationDtype(lambda weight: weight.dtype)

    @function(options=options)
    def train(temperature):
        def step(x, y):
            loss = model.loss(temperature, x, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            outfeed.enqueue(loss)

        repeat(NUM, step, infeed=infeed, gradient_accumulation=GA)

    losses = []
    for temperature in (0.7, 1.3):
        train(torch.tensor(temperature, dtype=dtype))
        losses.append(outfeed.dequeue())
    train.destroy()
    for schedule in SCHEDULES:
        found, weights, _ = piped(schedule, dtype=dtype)
        assert all(map(torch.equal, found, losses))
        assert all(map(torch.equal, weights, model.parameters()))


def test_the_schedule_is_the_one_asked_for():
    starts = {
        PipelineSchedule.Grouped: "0F0 1F0 0F1 1F1 0F2 1B0",
        PipelineSchedule.Interleaved: "0F0 1F0 1B0 0F1 0B0 1F1",
        PipelineSchedule.Sequential: "0F0 1F0 1B0 0B0 0F1",
        None: "0F0 1F0 0F1 1F1 0F2 1B0",
    }
    for schedule, start in starts.items():
        assert piped(schedule, 2)[2].startswith(start)


@pytest.mark.parametrize("method", METHOD)
def test_reductions(method):
    weights = piped(PipelineSchedule.Grouped, reduction_method=method)[1]
    for found, weight in zip(weights, eager(mean=method != METHOD.SUM)[1], strict=True):
        torch.testing.assert_close(found, weight)


def test_devices_change_nothing():
    found = piped(PipelineSchedule.Grouped, 2, device_mapping=[1, 0])
    expected = piped(PipelineSchedule.Grouped, 2)
    assert all(map(torch.equal, found[0] + found[1], expected[0] + expected[1]))


# What is enqueued


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sums_over_the_micro_batches_of_an_update(schedule):
    sums, weights, _ = piped(schedule, accumulate_outfeed=True)
    losses, expected, _ = piped(schedule)
    assert all(map(torch.equal, weights, expected))
    for found, values in zip(sums, losses, strict=True):
        assert found.shape == (REPEATS,)
        torch.testing.assert_close(found, values.view(REPEATS, GA).sum(1))


def test_sums_of_another_type():
    sums = piped(None, accumulate_outfeed=True, accumulate_outfeed_dtype=torch.float16)[0]
    losses = piped(None)[0]
    for found, values in zip(sums, losses, strict=True):
        assert found.dtype == torch.float16
        expected = values.view(REPEATS, GA).sum(1).half()
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def enqueued(last, ga=4, **settings):
    """Return what a pipeline of two stages enqueues in one update, and its data."""
    model = Layers()
    optimizer, outfeed = sgd(model), OutfeedQueue()
    infeed = InfeedQueue(elements())

    @function(options=OPTIONS)
    def train():
        pipeline(
            [lambda x, y: (model.first(x), y), last],
            ga,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            **settings,
        )

    hidden = [Layers().first(x).detach() for x, _ in elements()[:ga]]
    train()
    result = outfeed.dequeue()
    train.destroy()
    return result, hidden, optimizer


def training(model_loss):
    """Return settings of a pipeline that trains nothing but a weight of its own."""
    weight = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    return {
        "optimizer_function": lambda *args, **named: (
            optimizer,
            model_loss(*args, **named) * weight,
        )
    }


def test_a_mask_leaves_values_out():
    (found,), hidden, _ = enqueued(
        lambda h, y: (h.square().mean(), h, y),
        outfeed_mask=[True, False, True],
        **training(lambda loss, h, y: loss),
    )
    torch.testing.assert_close(found, torch.stack(hidden))


def test_the_loss_is_enqueued_instead():
    found, hidden, _ = enqueued(
        lambda h, y: h, outfeed_loss=True, **training(lambda h: h.square().mean())
    )
    torch.testing.assert_close(found, torch.stack([h.square().mean() for h in hidden]))


def test_a_dict_stays_one():
    found, hidden, _ = enqueued(
        lambda h, y: {"loss": h.mean(), "hidden": h}, **training(lambda loss, hidden: loss)
    )
    torch.testing.assert_close(found["hidden"], torch.stack(hidden))
    torch.testing.assert_close(found["loss"], torch.stack([h.mean() for h in hidden]))


def test_integers_add_up_in_a_floating_point_type():
    loss = training(lambda h, y: h.mean())
    found, _, _ = enqueued(
        lambda h, y: (h, y),
        accumulate_outfeed=True,
        accumulate_outfeed_dtype=torch.float32,
        **loss,
    )
    expected = sum(y for _, y in elements()[:4]).float()
    assert torch.equal(found[1], expected[None])
    with pytest.raises(Error, match="Sums for a queue need floating-point or complex tensors"):
        enqueued(lambda h, y: (h, y), accumulate_outfeed=True, **loss)


# Inference, and other forms of stages


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_inference(schedule):
    found, hidden, _ = enqueued(lambda h, y: h.relu(), pipeline_schedule=schedule)
    torch.testing.assert_close(found, torch.stack(hidden).relu())


def test_stages_can_be_modules():
    model, outfeed = Layers(), OutfeedQueue()
    data = [torch.randn(5, 4) for _ in range(4)]
    infeed = InfeedQueue(data)

    @function(options=OPTIONS)
    def infer():
        pipeline([model.first, nn.ReLU()], 4, infeed_queue=infeed, outfeed_queue=outfeed)

    infer()
    expected = torch.stack([model.first(x).relu() for x in data])
    torch.testing.assert_close(outfeed.dequeue(), expected.detach())


def test_dicts_are_keyword_arguments():
    model, outfeed = Layers(), OutfeedQueue()
    data = [{"x": torch.randn(5, 4), "shift": torch.randn(())} for _ in range(4)]
    infeed = InfeedQueue(data)

    @function(options=OPTIONS)
    def infer(scale):
        pipeline(
            [
                lambda scale, x, shift: {"h": model.first(x) * scale, "shift": shift},
                lambda shift, h: h + shift,
            ],
            4,
            inputs=(scale,),
            infeed_queue=infeed,
            outfeed_queue=outfeed,
        )

    infer(torch.tensor(2.0))
    expected = torch.stack([model.first(one["x"]) * 2 + one["shift"] for one in data])
    torch.testing.assert_close(outfeed.dequeue(), expected.detach())


@pytest.mark.parametrize("mapping", [None, [0, [1, 2], 3]])
def test_concurrent_functions_get_the_same_arguments(mapping):
    model = Layers()
    optimizer, outfeed, infeed = sgd(model), OutfeedQueue(), InfeedQueue(elements())
    other = nn.Linear(8, 8)
    before = [weight.detach().clone() for weight in other.parameters()]

    @function(options=OPTIONS)
    def train():
        pipeline(
            [
                lambda x, y: model.first(x),
                [lambda h: model.second(h), lambda h: (other(h), h)],
                lambda a, b, h: (a * b + h).square().mean(),
            ],
            6,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=lambda loss: (optimizer, loss),
            device_mapping=mapping,
        )

    train()
    eager = Layers()
    losses = []
    for x, _ in elements()[:6]:
        h = eager.first(x)
        losses.append((eager.second(h) * other(h) + h).square().mean())
    torch.testing.assert_close(outfeed.dequeue(), torch.stack(losses).detach())
    sum(losses).backward()
    with torch.no_grad():
        expected = eager.second.weight - 0.1 * eager.second.weight.grad
    torch.testing.assert_close(model.second.weight.detach(), expected)
    assert all(map(torch.equal, before, other.parameters()))


def test_options_of_the_function_that_say_something_else():
    options = OPTIONS.clone().pipelineSchedule(PipelineSchedule.Interleaved)

    @function(options=options)
    def infer():
        pipeline([lambda: None, lambda: None], 4)

    with pytest.raises(
        UsageValueError, match=r"has set PipelineSchedule\.Interleaved, and the pipelining"
    ):
        infer()


def test_a_queue_of_the_last_element_takes_no_sums():
    with pytest.raises(UsageValueError, match=r"accumulate_outfeed needs a queue of the mode"):
        pipeline(
            [lambda: None] * 2,
            4,
            outfeed_queue=OutfeedQueue(OutfeedMode.LAST),
            accumulate_outfeed=True,
            optimizer_function=lambda: None,
        )
