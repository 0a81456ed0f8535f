"""Concurrent stages of a pipeline have the bits of the same functions one after another."""


import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from tests.options import make_options

GA, UPDATES = 24, 2
SCHEDULES = list(PipelineSchedule)
OVERLAPPING = [one for one in SCHEDULES if one != PipelineSchedule.Sequential]


@pytest.fixture(autouse=True)
def threads():
    """Set how many threads PyTorch has, for a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Model(nn.Module):
    """Two branches between an embedding and a head, with random numbers and statistics."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(10, 6)
        self.left = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.25), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)

    def concurrent(self):
        return [
            lambda x, y: (self.table(x), y),
            [lambda h, y: (self.left(h), y), lambda h, y: self.right(h)],
            lambda a, y, b: nn.functional.cross_entropy(self.head(a * b), y),
        ]

    def series(self):
        return [
            lambda x, y: (self.table(x), y),
            lambda h, y: (self.left(h), h, y),
            lambda a, h, y: (a, y, self.right(h)),
            lambda a, y, b: nn.functional.cross_entropy(self.head(a * b), y),
        ]


def elements(count=GA * UPDATES):
    torch.manual_seed(1)
    return [(torch.randint(0, 10, (5,)), torch.randint(0, 3, (5,))) for _ in range(count)]


class Run:
    """One training run of a list of stages: what came out, and the state after it."""

    def __init__(self, stages_of, schedule, *, mapping=None, count=GA, **settings):
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        infeed, losses = poptorch.InfeedQueue(elements()), poptorch.OutfeedQueue()

        @poptorch.function(options=make_options().randomSeed(3).autoRoundNumIPUs(True))
        def train():
            poptorch.pipeline(
                stages_of(model),
                count,
                UPDATES,
                infeed_queue=infeed,
                outfeed_queue=losses,
                optimizer_function=lambda loss: (optimizer, loss),
                device_mapping=mapping,
                pipeline_schedule=schedule,
                **settings,
            )

        train()
        compiled = train.programs[0].compiled
        self.plan, self.run = compiled.executable.plan, compiled.run
        self.actions, self.program = compiled.executable.actions(), compiled.program
        self.results = [losses.dequeue(), *map(torch.clone, model.state_dict().values())]
        train.destroy()
        infeed.close()

    def __eq__(self, other):
        assert len(self.results) == len(other.results)
        return all(map(torch.equal, self.results, other.results))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_concurrent_stages_have_the_bits_of_stages_in_series(schedule, threads):
    threads(1)
    expected = Run(Model.series, PipelineSchedule.Sequential)
    assert Run(Model.concurrent, schedule, mapping=[0, [1, 2], 3]) == expected
    threads(4)
    run = Run(Model.concurrent, schedule)
    lanes = [0, 0, 0, 0] if schedule == PipelineSchedule.Sequential else [0, 1, 2, 3]
    assert run.plan.lane_of_stage == lanes
    assert run == expected


@pytest.mark.parametrize("num_threads", [2, 3])
def test_with_fewer_threads_some_stages_share_one(num_threads, threads, monkeypatch):
    threads(1)
    expected = Run(Model.concurrent, PipelineSchedule.Grouped)
    threads(4)
    monkeypatch.setenv("POPSIM_STAGE_THREADS", str(num_threads))
    run = Run(Model.concurrent, PipelineSchedule.Grouped)
    assert len(set(run.plan.lane_of_stage)) == num_threads
    assert run == expected


def test_the_pipeline_is_as_long_as_the_list():
    run = Run(Model.concurrent, PipelineSchedule.Grouped, mapping=[0, [1, 2], 2])
    assert run.run.positions == (0, 1, 1, 2)
    assert run.run.num_ipus == 4
    assert run.plan.max_in_flight == 6
    assert Run(Model.series, PipelineSchedule.Grouped).plan.max_in_flight == 8
