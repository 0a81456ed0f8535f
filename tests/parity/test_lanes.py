"""Stages that threads of their own run give the bits of one thread, and end as one thread does."""

import threading
import time

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from tests.options import make_options

GA, D, MICRO_BATCH = 48, 2, 3
SCHEDULES = [s for s in PipelineSchedule if s not in (PipelineSchedule.Default,)]
PIPELINED = [s for s in SCHEDULES if s != PipelineSchedule.Sequential]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def threads():
    """Set how many threads PyTorch has, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Model(nn.Module):
    """Eight layers with tables, running statistics and random numbers, one stage each or several."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Embedding(10, 6),
            nn.BatchNorm1d(6),
            nn.Linear(6, 8),
            nn.Tanh(),
            nn.Dropout(0.25),
            nn.Linear(8, 8),
            nn.GELU(),
            nn.Linear(8, 3),
        )

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out, y)


def stages_of(count: int) -> list[int]:
    return [layer * count // 8 for layer in range(8)]


def data(seed=1, calls=2, num_rows=10):
    torch.manual_seed(seed)
    size = MICRO_BATCH * D * GA
    return [
        (torch.randint(0, num_rows, (size,)), torch.randint(0, 3, (size,))) for _ in range(calls)
    ]


def wrap(model, num_stages, schedule, training=True):
    options = make_options(D if training else D * GA, GA if training else 1, seed=3)
    options.outputMode(poptorch.OutputMode.All).autoRoundNumIPUs(True)
    options.pipelineSchedule(schedule)
    options.anchorTensor("sum", "Gradient___layers.2.weight", output_mode=poptorch.OutputMode.Sum)
    poptorch.set_pipeline_stage_assignment(model.layers, stages_of(num_stages))
    if not training:
        options.anchored_tensors.clear()
        return poptorch.inferenceModel(model, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return poptorch.trainingModel(model, options, optimizer)




def results(num_stages, schedule):
    model = Model()
    training = wrap(model, num_stages, schedule)
    found = [tensor for x, y in data() for tensor in training(x, y)]
    found.append(training.getAnchoredTensor("sum"))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    training.destroy()
    return [*found, *state.values()]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", PIPELINED)
def test_lanes_give_the_bits_of_one_thread(schedule, num_stages, threads):
    threads(1)
    expected = results(num_stages, schedule)
    threads(num_stages)
    model = Model()
    training = wrap(model, num_stages, schedule)
    training.compile(*data()[0])
    lanes = training.compiled.executable.plan.lane_of_stage
    assert lanes == list(range(num_stages))
    training.destroy()
    for found, one in zip(results(num_stages, schedule), expected, strict=True):
        assert torch.equal(found, one)
