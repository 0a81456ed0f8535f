"""Concurrent stages of a pipeline have the bits of the same functions one after another."""

import random

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error
from tests.options import make_options
from tests.parity.test_pipeline_combinations import Late, load_late

GA, UPDATES = 24, 2
SCHEDULES = list(PipelineSchedule)
OVERLAPPING = [one for one in SCHEDULES if one != PipelineSchedule.Sequential]


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


def test_the_sum_of_gradients_is_where_their_tensor_is():
    """Else one of the concurrent stages would wait for the other in the backward pass."""
    run = Run(Model.concurrent, PipelineSchedule.Grouped)
    name = "Gradient___self/table/Gather:0"
    graph = run.program.graph
    gradient = graph.root_of(graph.names[name])
    assert [op.stage for op in graph.ops if gradient in graph.roots(op.outputs)] == [0]


def test_the_pipeline_is_as_long_as_the_list():
    run = Run(Model.concurrent, PipelineSchedule.Grouped, mapping=[0, [1, 2], 2])
    assert run.run.positions == (0, 1, 1, 2)
    assert run.run.num_ipus == 4
    assert run.plan.max_in_flight == 6
    assert Run(Model.series, PipelineSchedule.Grouped).plan.max_in_flight == 8


class Half(nn.Module):
    """Reads one half of its input, twice."""

    def __init__(self, begin):
        super().__init__()
        self.begin = begin

    def forward(self, x):
        half = x[:, self.begin : self.begin + 2]
        return torch.cat([half, half.tanh()], 1)


class Drawn(nn.Module):
    """Stages and lists of stages with drawn layers; each stage adds up all values that it gets."""

    def __init__(self, seed, concurrent):
        super().__init__()
        load_late()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.sizes = [draw.choice([1, 1, 2, 2, 3]) for _ in range(draw.randint(2, 4))]
        self.table, self.tied = nn.Embedding(10, 4), nn.Linear(4, 4)
        kinds = {
            "linear": lambda: nn.Linear(4, 4),
            "batch norm": lambda: nn.BatchNorm1d(4),
            "dropout": lambda: nn.Dropout(0.25),
            "tanh": nn.Tanh,
            "identity": nn.Identity,
            "half": lambda: Half(draw.choice([0, 2])),
            "late": Late,
            "tied": lambda: self.tied,
        }
        self.layers = nn.ModuleList(
            nn.Sequential(*(kinds[draw.choice(list(kinds))]() for _ in range(draw.randint(1, 3))))
            for _ in range(sum(self.sizes))
        )
        self.queue, self.queue_at = poptorch.OutfeedQueue(), draw.randrange(len(self.layers))
        self.training = draw.random() < 0.8
        drawn = draw.choice(SCHEDULES)
        self.schedule = drawn if concurrent else PipelineSchedule.Sequential
        self.count = 2 * len(self.sizes) * draw.randint(1, 3)
        self.lanes = draw.randint(1, len(self.layers))
        self.recomputation = draw.choice([None, 0, 1, 3, 4])
        self.concurrent = concurrent

    def stages(self):
        """Return the list of stages; without concurrent ones, each list is one function."""
        found, number = [], 0
        for size in self.sizes:
            group = [self.stage(number + n, n + 1 == size) for n in range(size)]
            found.append(group if self.concurrent else self.one_after_another(group))
            number += size
        return found

    def stage(self, number, hands_labels_on):
        def run(x, *others):
            *others, y = others
            x = self.table(x) if number < self.sizes[0] else sum(others, x)
            x = self.layers[number](x)
            if number == self.queue_at:
                self.queue.enqueue(x)
            return (x, y) if hands_labels_on else x

        return run

    @staticmethod
    def one_after_another(group):
        def run(*args):
            results = [function(*args) for function in group]
            return (*results[:-1], *results[-1])

        return run

    def results(self):
        """Run it, and return what came out, and the state after it."""
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(1)
        data = [torch.randint(0, 10, (2, 3)).unbind() for _ in range(2 * self.count)]
        infeed, outfeed = poptorch.InfeedQueue(data), poptorch.OutfeedQueue()
        options = make_options().randomSeed(3).autoRoundNumIPUs(True)
        if self.recomputation is not None:
            options._Popart.set("autoRecomputation", self.recomputation)

        def with_loss(*args):
            *values, y = args
            return optimizer, sum(nn.functional.cross_entropy(value, y % 4) for value in values)

        @poptorch.function(options=options)
        def run():
            poptorch.pipeline(
                self.stages(),
                self.count,
                2,
                infeed_queue=infeed,
                outfeed_queue=outfeed,
                optimizer_function=with_loss if self.training else None,
                pipeline_schedule=self.schedule,
            )

        run()
        plan = run.programs[0].compiled.executable.plan
        found = [*outfeed.dequeue(), self.queue.dequeue(), *self.state_dict().values()]
        found = [tensor.detach().clone() for tensor in found]
        run.destroy()
        infeed.close()
        return found, plan


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 200))]
)
def test_drawn_stages_have_the_bits_of_one_thread(seed, threads, monkeypatch):
    threads(1)
    expected, _ = Drawn(seed, concurrent=False).results()
    drawn = Drawn(seed, concurrent=True)
    threads(len(drawn.layers))
    monkeypatch.setenv("POPSIM_STAGE_THREADS", str(drawn.lanes))
    found, plan = drawn.results()
    assert max(plan.lane_of_stage) < drawn.lanes
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


class Tables(nn.Module):
    """A table in each of two concurrent stages, which are the first or the last ones."""

    def __init__(self, first):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two, self.first = nn.Embedding(10, 4), nn.Embedding(20, 4), first

    def stages(self):
        both = [lambda i: self.one(i), lambda i: self.two(i)]
        return [both, lambda a, b: (a, b)] if self.first else [lambda i: i + 1, both]


def run_tables(elements, *, first, training):
    """Run it twice, and return what the second run tells and leaves behind, and the lanes."""
    model, outfeed = Tables(first), poptorch.OutfeedQueue()
    infeed = poptorch.InfeedQueue(elements)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @poptorch.function(options=make_options().autoRoundNumIPUs(True))
    def run():
        poptorch.pipeline(
            model.stages(),
            8,
            2,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=(
                (lambda a, b: (optimizer, (a * b).square().mean())) if training else None
            ),
        )

    run()
    lanes = run.programs[0].compiled.executable.plan.lane_of_stage
    found = list(outfeed.dequeue())
    with pytest.raises(Error) as told:
        run()
    found += [value.detach().clone() for value in model.state_dict().values()]
    run.destroy()
    infeed.close()
    return str(told.value), found, lanes


@pytest.mark.timeout(60)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "wrong", [{3: 10}, {3: 20}, {7: 10, 8: 20}, {4: 20, 5: 10}, "data ends in 5", "data ends in 11"]
)
def test_what_fails_in_a_concurrent_stage_fails_as_on_one_thread(wrong, first, training, threads):
    rows, end = torch.arange(32) % 9, 32
    if isinstance(wrong, dict):
        for place, row in wrong.items():
            rows[16 + place] = row
    else:
        end = 16 + int(wrong.split()[-1])
    elements = list(rows[:end].reshape(-1, 1))
    results = []
    for num_threads in (1, 3):
        threads(num_threads)
        results.append(run_tables(elements, first=first, training=training))
    (told, found, _), (other_told, other_found, lanes) = results
    assert lanes == list(range(len(lanes)))
    assert told == other_told
    assert len(found) == len(other_found)
    assert all(map(torch.equal, found, other_found))
