"""``popsim_torch.plan``: its proposals against even splits, real compilations and its own rules."""

import itertools

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Funnel(nn.Module):
    """Wide layers first: an even split leaves the last stages idle."""

    def __init__(self):
        super().__init__()
        sizes = [1024, 4096, 4096, 1024, 256, 128, 128, 64, 64]
        pairs = itertools.pairwise(sizes)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairs)
        self.head = nn.Linear(64, 10)

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return nn.functional.cross_entropy(self.head(x), y)


class Pictures(nn.Module):
    """Convolutions with large kernels first: most work is at the beginning."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 32, 7, padding=3),
            nn.Conv2d(32, 32, 7, padding=3),
            nn.Conv2d(32, 32, 7, padding=3),
            nn.MaxPool2d(2),
            *(nn.Conv2d(32, 32, 1) for _ in range(5)),
            nn.AdaptiveAvgPool2d(1),
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.head(self.features(x).flatten(1)), y)


class Words(nn.Module):
    """A large vocabulary at both ends of a small encoder."""

    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(20000, 64)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(6)
        )
        self.head = nn.Linear(64, 20000)

    def forward(self, ids, y):
        x = self.word(ids)
        for block in self.body:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


CASES = {
    "funnel": (Funnel, lambda: (torch.zeros(32, 1024), torch.zeros(32, dtype=torch.long))),
    "pictures": (Pictures, lambda: (torch.zeros(4, 3, 32, 32), torch.zeros(4, dtype=torch.long))),
    "words": (
        Words,
        lambda: (torch.zeros(4, 16, dtype=torch.long), torch.zeros(4, 16, dtype=torch.long)),
    ),
}


def proposed(name, **settings):
    make, data = CASES[name]
    with torch.device("meta"):
        model = make()
    options = poptorch.Options().enableSyntheticData(True)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    given = {"num_ipus": 3, "options": options, "optimizer": optimizer} | settings
    return model, poptorch.plan(model, data(), **given)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_faster_than_an_even_split(name):
    _, plan = proposed(name)
    assert plan.verdict == "fits"
    assert len(plan.stages) == 3
    assert plan.seconds < 0.95 * plan.even.seconds


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_model_costs_what_its_plan_says(name):
    _, data = CASES[name]
    model, plan = proposed(name)
    options = poptorch.Options().enableSyntheticData(True)
    plan.apply(model, options)
    args = tuple(torch.cat([one] * plan.accumulation) for one in data())
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    found = poptorch.estimate(model, args, options=options, optimizer=optimizer)
    assert found.update_cycles == pytest.approx(plan.estimate.update_cycles, rel=0.02)
    assert found.verdict == plan.verdict
    assert [ipu.stages for ipu in found.ipus] == [(0,), (1,), (2,)]


def test_a_planned_model_runs_and_trains():
    torch.manual_seed(0)
    model = Funnel()
    options = poptorch.Options()
    data = torch.randn(8, 1024), torch.randint(10, (8,))
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.05)
    plan = poptorch.plan(model, data, num_ipus=2, optimizer=optimizer)
    plan.apply(model, options)
    trained = poptorch.trainingModel(model, options, optimizer)
    batch = tuple(torch.cat([one] * plan.accumulation) for one in data)
    losses = [float(trained(*batch).mean()) for _ in range(5)]
    assert losses[-1] < losses[0]
    assert len(trained.stages()) == len(plan.stages)


def test_the_plan_shows_what_it_weighed():
    _, plan = proposed("funnel")
    text = str(plan)
    assert "Simulated" in text
    assert plan.binding in text
    schedules = {one.candidate.schedule for one in plan.alternatives}
    assert schedules == set(poptorch.PipelineSchedule)
    assert {one.candidate.recomputes for one in plan.alternatives} == {True, False}
    assert {one.candidate.num_stages for one in plan.alternatives} == {1, 2, 3}
    ranks = [one.rank for one in plan.alternatives]
    assert ranks == sorted(ranks)
    names = [name for stage in plan.stages for name in stage.layers]
    assert names == [*plan.assignment]
    assert names[0] == "layers.0"
    assert names[-1] == "head"


def test_the_accumulation_is_given_or_fills_the_pipeline():
    _, chosen = proposed("funnel")
    assert chosen.accumulation >= 2 * 3 - 1
    assert max(ipu.use for ipu in chosen.estimate.ipus) >= 0.8
    _, given = proposed("funnel", accumulation=8)
    assert given.accumulation == 8
    options = poptorch.Options().enableSyntheticData(True)
    options.Training.gradientAccumulation(16)
    _, of_options = proposed("funnel", options=options)
    assert of_options.accumulation == 16
    assert options.Training.gradient_accumulation == 16


def test_too_few_micro_batches_for_a_pipeline_are_told(caplog):
    with caplog.at_level("WARNING", logger="poptorch::python"):
        _, plan = proposed("funnel", accumulation=1)
    assert "needs 2 or more" in caplog.text
    sequential = poptorch.PipelineSchedule.Sequential
    assert {one.candidate.schedule for one in plan.alternatives} == {sequential}


def test_what_does_not_fit_is_recomputed_or_said():
    options = poptorch.Options().enableSyntheticData(True).machine(tiles=40)
    _, plan = proposed("funnel", options=options)
    assert plan.verdict == "does not fit"
    assert plan.binding.startswith("memory: IPU")
    _, roomy = proposed("funnel")
    assert roomy.verdict == "fits"


def test_inference_is_planned():
    with torch.device("meta"):
        model = Pictures()
    plan = poptorch.plan(model.features, torch.zeros(4, 3, 64, 64), num_ipus=2)
    assert not plan.training
    assert len(plan.stages) == 2
    options = poptorch.Options()
    plan.apply(model.features, options)
    assert options.device_iterations == plan.accumulation


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return (self.w * x).sum()


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        ("UsageValueError", "num_ipus is 0", lambda m: poptorch.plan(m, X, num_ipus=0)),
        ("UsageTypeError", "num_ipus is '4'", lambda m: poptorch.plan(m, X, num_ipus="4")),
        ("UsageTypeError", "must be a torch.nn.Module", lambda m: poptorch.plan(3, X, num_ipus=2)),
        ("Error", "calls no modules", lambda m: poptorch.plan(Bare(), X, num_ipus=2)),
    ],
)
def test_mistakes(error, message, call):
    with pytest.raises(getattr(poptorch, error, poptorch.Error), match=message):
        call(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))


def test_a_model_with_stages_is_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    poptorch.set_pipeline_stage_assignment(model, [0, 1])
    with pytest.raises(poptorch.Error, match="has stages of its own"):
        poptorch.plan(model, X, num_ipus=2)


X = torch.zeros(2, 3)
