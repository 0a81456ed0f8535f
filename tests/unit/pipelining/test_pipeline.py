"""The pipelines that ``poptorch.pipeline`` refuses, and when."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.feeds import InfeedQueue, OutfeedQueue
from popsim_torch.loops import function
from popsim_torch.pipelining import pipeline

OPTIONS = poptorch.Options().showCompilationProgressBar(False)


def nothing(*args):
    """A stage that returns nothing."""


def train(*args):
    """An optimizer function that is never called."""


TWO = [nothing, nothing]


@pytest.mark.parametrize(
    "stages, error, message",
    [
        (nothing, UsageTypeError, "computational_stages is a function. Pass a list"),
        ([], UsageValueError, "0 stages are listed. A pipeline has two or more"),
        ([nothing], UsageValueError, "1 stages are listed.*poptorch.repeat"),
        ([nothing, 3], UsageTypeError, "stage 1 is a int. Pass a function, a module"),
        ([nothing, []], UsageValueError, "stage 1 is an empty list"),
        ([nothing, [nothing, 3]], UsageTypeError, "stage 2 is a int"),
        ([[[nothing]], nothing], UsageTypeError, "stage 0 is a list inside.*cannot be nested"),
    ],
)
def test_the_stages(stages, error, message):
    with pytest.raises(error, match=message):
        pipeline(stages, 4)


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"gradient_accumulation_count": None}, UsageValueError, "Grouped needs .* 2 n for n"),
        ({"gradient_accumulation_count": 3}, Error, "device iterations must be .* of 2, .* is 3"),
        (
            {"gradient_accumulation_count": 6, "optimizer_function": train},
            Error,
            "must be a positive multiple of 4.*Set it to 4 or 8.*gradient_accumulation_count of",
        ),
        ({"gradient_accumulation_count": 0}, UsageValueError, "Pass 1 or more"),
        ({"repeat_count": 0}, UsageValueError, "repeat_count=0. Pass 1 or more"),
        ({"repeat_count": 1.5}, UsageTypeError, "repeat_count=1.5. Pass an int"),
        ({"device_mapping": 3}, UsageTypeError, "device_mapping=3"),
        ({"device_mapping": [0]}, UsageValueError, "1 entries for 2 stages"),
        ({"device_mapping": [0, "1"]}, UsageTypeError, "'1' for stage 1. Pass an int"),
        ({"device_mapping": [0, [1, 2]]}, UsageValueError, r"\[1, 2\] for stage 1. Pass an int"),
        ({"device_mapping": [0, -1]}, UsageValueError, "0 or more"),
        ({"pipeline_schedule": "Grouped"}, UsageTypeError, "Use one of PipelineSchedule.Grouped"),
        (
            {
                "pipeline_schedule": PipelineSchedule.Interleaved,
                "device_mapping": [0, 0],
                "optimizer_function": train,
            },
            Error,
            "stages 0 and 1 are both on IPU 0",
        ),
        ({"outfeed_queue": 3}, UsageTypeError, "outfeed_queue is a int"),
        ({"outfeed_loss": 1}, UsageTypeError, "outfeed_loss=1. Pass True or False"),
        ({"outfeed_loss": True}, UsageValueError, "outfeed_loss needs an optimizer_function"),
        ({"outfeed_mask": [True]}, UsageValueError, "outfeed_mask needs an optimizer_function"),
        ({"outfeed_mask": [1]}, UsageTypeError, r"outfeed_mask=\[1\]. Pass a list with True"),
        (
            {"outfeed_mask": [True], "outfeed_loss": True, "optimizer_function": train},
            UsageValueError,
            "outfeed_loss and outfeed_mask exclude each other",
        ),
        (
            {"accumulate_outfeed": True},
            UsageValueError,
            "accumulate_outfeed needs an optimizer_function",
        ),
        (
            {"accumulate_outfeed": True, "optimizer_function": train},
            UsageValueError,
            "accumulate_outfeed needs an outfeed_queue",
        ),
        (
            {"accumulate_outfeed_dtype": torch.float32},
            UsageValueError,
            "accumulate_outfeed_dtype is the type of sums",
        ),
        ({"offload_weight": True}, UsageTypeError, "no argument 'offload_weight'.*offload_weights"),
        ({"batch_serialization_iterations": 2}, Error, "not supported"),
    ],
)
def test_the_settings(settings, error, message):
    with pytest.raises(error, match=message):
        pipeline(TWO, **{"gradient_accumulation_count": 4, **settings})


def test_a_type_of_sums_that_there_is_not():
    with pytest.raises(UsageValueError, match=r"torch.int32. Pass torch.float32 or"):
        pipeline(
            TWO,
            4,
            outfeed_queue=OutfeedQueue(),
            optimizer_function=train,
            accumulate_outfeed=True,
            accumulate_outfeed_dtype=torch.int32,
        )


@pytest.mark.parametrize(
    "mapping, message",
    [
        ([0, [1, 1]], r"\[1, 1\] for the stages 1 and 2. Concurrent stages need an IPU each"),
        ([0, 1], "device_mapping has 1 for the stages 1 and 2. Pass a list of 2 ints"),
        ([0, [1, 2, 3]], r"\[1, 2, 3\] for the stages 1 and 2. Pass a list of 2 ints"),
        ([[0, 1], [1, 2]], r"\[0, 1\] for stage 0. Pass an int"),
        ([0, 1, 2], "device_mapping has 3 entries for 2 stages and lists of stages. Pass one for"),
        ([0, [1, -2]], r"device_mapping=\[0, 1, -2\]. Pass the IPU of each stage, 0 or more"),
    ],
)
def test_concurrent_stages_need_ipus_of_their_own(mapping, message):
    with pytest.raises(UsageValueError, match=message):
        pipeline([nothing, [nothing, nothing]], 4, device_mapping=mapping)


def test_the_count_is_a_multiple_of_the_length_of_the_pipeline():
    with pytest.raises(Error, match=r"with 3 stages: .* a positive multiple of 6, .* and is 8"):
        pipeline([nothing, [nothing, nothing], nothing], 8, optimizer_function=lambda: None)


def test_outside_of_a_function():
    with pytest.raises(Error, match="it is called outside of a"):
        pipeline(TWO, 4)


# In a trace


def run(stages, **settings):
    infeed = InfeedQueue([torch.ones(2)] * 4)

    @function(options=OPTIONS)
    def traced():
        pipeline(stages, 4, infeed_queue=infeed, **settings)

    traced()


@pytest.mark.parametrize(
    "stages, message",
    [
        ([lambda: None, nothing], r"stage 0 gets 1 value\(s\) from the inputs and the infeed"),
        ([lambda x: (x, x), lambda x: x], r"stage 1 gets 2 value\(s\) from stage 0, and it takes"),
        ([lambda x: {"a": x}, lambda b: b], r"stage 1 gets 0 value\(s\) and a from stage 0"),
        (
            [[lambda x: {"a": x}, lambda x: x], nothing],
            "stage 0 returns a dict, and the results of concurrent stages",
        ),
    ],
)
def test_what_stages_hand_on(stages, message):
    with pytest.raises(UsageTypeError, match=message):
        run(stages, outfeed_queue=OutfeedQueue())


def test_values_without_a_queue():
    with pytest.raises(UsageValueError, match="returns values, and there is no outfeed_queue"):
        run([lambda x: x, lambda x: x])


def test_a_tensor_that_would_be_a_constant():
    scale = torch.ones(2)
    with pytest.raises(Error, match="stage 1 uses the tensor 'scale', which would be a constant"):
        run([lambda x: x, lambda x: x * scale], outfeed_queue=OutfeedQueue())


@pytest.mark.parametrize("mask", [[True], [True, False, False]])
def test_a_mask_of_another_length(mask):
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with pytest.raises(UsageValueError, match=rf"has {len(mask)} entries, .* returns 2 value"):
        run(
            [lambda x: x * weight, lambda x: (x.sum(), x)],
            outfeed_queue=OutfeedQueue(),
            outfeed_mask=mask,
            optimizer_function=lambda loss, x: (optimizer, loss),
        )


@pytest.mark.parametrize(
    "returned", [lambda loss: loss, lambda loss: (loss, loss), lambda loss: None]
)
def test_what_an_optimizer_function_returns(returned):
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(UsageTypeError, match="Return the optimizer and the loss, a tuple of two"):
        run(
            [lambda x: x * weight, lambda x: x.sum()],
            outfeed_queue=OutfeedQueue(),
            optimizer_function=returned,
        )


def test_an_optimizer_that_is_made_in_the_trace():
    weight = nn.Parameter(torch.ones(2))
    with pytest.raises(Error, match="made its optimizer while the pipeline was traced"):
        run(
            [lambda x: x * weight, lambda x: x.sum()],
            outfeed_queue=OutfeedQueue(),
            optimizer_function=lambda loss: (torch.optim.SGD([weight], lr=0.1), loss),
        )


def test_a_part_of_a_model_that_is_cut_out_in_the_trace_is_nothing_new():
    layers, outfeed = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), OutfeedQueue()
    run([lambda x: layers[:2](x), lambda x: layers[2:](x)], outfeed_queue=outfeed)
    torch.testing.assert_close(outfeed.dequeue()[0], layers(torch.ones(2)).detach())


def test_a_layer_that_is_made_in_the_trace():
    with pytest.raises(Error, match="uses a Linear that was made during the trace"):
        run([lambda x: nn.Linear(2, 2)(x), lambda x: x], outfeed_queue=OutfeedQueue())
