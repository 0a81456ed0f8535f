"""The share of time that a pipeline computes: compared with schedules built slot by slot."""

import itertools

import pytest

from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.stages import pipeline_use, smallest_gradient_accumulation

TIMES = [(1.0, 1.0, 0.0), (1.0, 2.0, 0.0), (2.0, 0.5, 3.0), (1.0, 0.0, 1.0)]
# Slots from one micro-batch to the next, for n stages.
GAPS = {
    PipelineSchedule.Grouped: lambda n: 1,
    PipelineSchedule.Default: lambda n: 1,
    PipelineSchedule.Interleaved: lambda n: 2,
    PipelineSchedule.Sequential: lambda n: 2 * n,
}


def time_of_slots(n, g, schedule, forward, backward):
    """Place micro-batches on a ring of 2 n places; a slot takes as long as its busiest IPU."""
    slots = {}
    for micro_batch, place in itertools.product(range(g), range(2 * n)):
        ipu, seconds = (place, forward) if place < n else (2 * n - 1 - place, backward)
        if schedule == PipelineSchedule.Default and place >= n:
            place -= 1  # the last stage continues at once
        slot = slots.setdefault(micro_batch * GAPS[schedule](n) + place, {})
        slot[ipu] = slot.get(ipu, 0) + seconds
    if schedule == PipelineSchedule.Interleaved:  # each half waits for the slower one
        return max(forward, backward) * len(slots)
    return sum(max(slot.values()) for slot in slots.values())


@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize(("forward", "backward", "update"), TIMES)
@pytest.mark.parametrize(("n", "factor"), [(1, 4), (2, 1), (2, 4), (3, 2), (4, 6)])
def test_use(schedule, forward, backward, update, n, factor):
    g = 2 * n * factor
    expected = g * (forward + backward)
    expected /= time_of_slots(n, g, schedule, forward, backward) + update
    times = {"forward": forward, "backward": backward, "update": update}
    assert pipeline_use(n, g, schedule, **times) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", PipelineSchedule)
@pytest.mark.parametrize(("forward", "backward", "update"), TIMES[:3])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("use", [0.1, 0.5, 0.75, 0.9])
def test_the_smallest_count(schedule, forward, backward, update, n, use):
    times = {"forward": forward, "backward": backward, "update": update}
    steps = {PipelineSchedule.Grouped: 2 * n, PipelineSchedule.Interleaved: n}
    first = 2 * n - 1 if schedule == PipelineSchedule.Default else steps.get(schedule, 1)
    step = 1 if n == 1 else steps.get(schedule, 1)
    counts = range(1 if n == 1 else first, 2000, step)

    def is_enough(g):
        return pipeline_use(n, g, schedule, **times) >= use

    if is_enough(counts[-1]):
        enough = next(filter(is_enough, counts))
        assert smallest_gradient_accumulation(n, schedule, use=use, **times) == enough
    else:
        with pytest.raises(UsageValueError, match=r"is used .*% at most"):
            smallest_gradient_accumulation(n, schedule, use=use, **times)


def test_the_usual_answer():
    assert smallest_gradient_accumulation(4) == 27
    assert smallest_gradient_accumulation(4, PipelineSchedule.Grouped) == 32
    assert pipeline_use(4, 27) == 0.9


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"num_stages": 0}, UsageValueError, "num_stages is 0. Pass 1 or more"),
        ({"num_stages": 65}, UsageValueError, "one process can use 64 IPUs. Pass 64 or less"),
        ({"num_stages": 2.5}, UsageTypeError, "num_stages is 2.5. Pass an int"),
        ({"schedule": "Grouped"}, UsageTypeError, "Pass a PipelineSchedule"),
        ({"forward": -1}, UsageValueError, "forward is -1. Pass 0 or more"),
        ({"update": "1"}, UsageTypeError, "update is '1'. Pass a number"),
        ({"update": float("nan")}, UsageValueError, "update is nan"),
        ({"forward": 0, "backward": 0}, UsageValueError, "are both 0"),
        ({"use": 1}, UsageValueError, "use is 1. Pass a share between 0 and 1"),
        ({"use": 0.0}, UsageValueError, "use is 0.0. Pass a share"),
    ],
)
def test_mistakes(arguments, kind, text):
    with pytest.raises(kind, match=text):
        smallest_gradient_accumulation(**{"num_stages": 2, **arguments})
    if "use" not in arguments:
        with pytest.raises(kind, match=text):
            pipeline_use(**{"num_stages": 2, "gradient_accumulation": 4, **arguments})
