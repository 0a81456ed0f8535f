"""Drawn pipelines have the bits of the same model with one micro-batch at a time on one thread.

Each seed draws a model and the settings of its pipeline. Compared are the outputs of two calls,
anchored tensors, what queues and prints got, weights, buffers, optimizer state and random numbers.
"""

import ctypes
import functools
import random
import re
from collections.abc import Container
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import OutputMode, PipelineSchedule
from tests.custom_ops.library import compiled
from tests.options import make_options

SCHEDULES = list(PipelineSchedule)
LAYERS = ("linear", "batch norm", "layer norm", "dropout", "gelu", "tanh", "tied", "late")
OPTIMIZERS = ("sgd", "momentum", "combined", "adam", "adamw", "rmsprop")
ROWS, WIDTH, CLASSES = 3, 4, 5
PLAIN, ALL = 25, 500

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(120)]


@functools.cache
def load_late() -> None:
    """Load the operator that takes a random time."""
    ctypes.cdll.LoadLibrary(str(compiled("late.c", "late_calls")))


@dataclass(frozen=True)
class Case:
    """A drawn pipeline."""

    layers: tuple[str, ...]  # after an embedding, before a head
    stages: tuple[int, ...]  # of the embedding, the layers and the head
    training: bool
    schedule: PipelineSchedule
    lanes: int
    threads: int
    device_iterations: int
    accumulation: int
    optimizer: str
    output_mode: OutputMode
    anchors: tuple[tuple[OutputMode, int, float], ...]  # with period, and which tensor
    queue_at: int | None
    print_at: int | None
    checkpoint_at: int | None
    recomputation: int | None
    loss_scaling: bool

    @staticmethod
    def drawn(seed: int) -> "Case":
        draw = random.Random(seed)
        num_layers = draw.randint(1, 9)
        num_stages = draw.randint(1, min(8, num_layers + 2))
        layers = tuple(draw.choice(LAYERS) for _ in range(num_layers))
        cuts = sorted(draw.sample(range(1, num_layers + 2), num_stages - 1))
        stages = tuple(sum(cut <= place for cut in cuts) for place in range(num_layers + 2))
        training = draw.random() < 0.8
        schedule = draw.choice(SCHEDULES)
        slots = 2 * num_stages if training else num_stages
        count = draw.randint(1, 3) * slots
        iterations = draw.randint(1, 3)

        def maybe(chance):
            return draw.randrange(num_layers) if draw.random() < chance else None

        modes = [OutputMode.Final, OutputMode.All, OutputMode.Sum, OutputMode.EveryN]
        anchors = [draw.choice(modes) for _ in range(draw.randint(0, 4))]
        several = num_stages > 1 and schedule != PipelineSchedule.Sequential
        if several or (iterations if training else count) % 2:
            anchors = [mode for mode in anchors if mode != OutputMode.EveryN]
        return Case(
            layers,
            stages,
            training,
            schedule,
            lanes=draw.randint(1, num_stages),
            threads=draw.randint(1, num_stages),
            device_iterations=iterations if training else count,
            accumulation=count if training else 1,
            optimizer=draw.choice(OPTIMIZERS),
            output_mode=draw.choice(modes[:3]),
            anchors=tuple(
                (mode, 2 if mode == OutputMode.EveryN else 1, draw.random()) for mode in anchors
            ),
            queue_at=maybe(0.3),
            print_at=maybe(0.15),
            checkpoint_at=maybe(0.3),
            recomputation=draw.choice([None, None, 0, 1, 3, 4]),
            loss_scaling=training and draw.random() < 0.2,
        )


class Model(nn.Module):
    """The layers of a case."""

    def __init__(self, case: Case, queue) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case, self.queue = case, queue
        table, head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        made = [self.layer(kind) for kind in case.layers]
        for kind, layer in zip(case.layers, made, strict=True):
            if kind == "tied":
                layer.weight = made[case.layers.index("tied")].weight
        self.layers = nn.ModuleList([table, *made, head])
        poptorch.set_pipeline_stage_assignment(self.layers, list(case.stages))

    @staticmethod
    def layer(kind: str) -> nn.Module:
        if kind in ("linear", "tied"):
            return nn.Linear(WIDTH, WIDTH)
        made = {
            "batch norm": lambda: nn.BatchNorm1d(WIDTH),
            "layer norm": lambda: nn.LayerNorm(WIDTH),
            "dropout": lambda: nn.Dropout(0.25),
            "gelu": nn.GELU,
            "tanh": nn.Tanh,
            "late": Late,
        }
        return made[kind]()

    def forward(self, x, y):
        case, x = self.case, self.layers[0](x)
        for place, layer in enumerate(self.layers[1:-1]):
            x = layer(x)
            if place == case.queue_at:
                self.queue.enqueue(x)
            if place == case.print_at:
                x = poptorch.ipu_print_tensor(x, "printed")
            if place == case.checkpoint_at:
                x = poptorch.recomputationCheckpoint(x)
        out = self.layers[-1](x)
        return out, nn.functional.cross_entropy(out, y)


class Late(nn.Module):
    """An identity that takes a random time."""

    def forward(self, x):
        (result,) = poptorch.custom_op([x], "Late", "popsim_tests.late", 1, [x])
        return result


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    parameters, optim = model.parameters(), poptorch.optim
    made = {
        "sgd": lambda: optim.SGD(parameters, lr=0.05, use_combined_accum=False),
        "momentum": lambda: optim.SGD(
            parameters, lr=0.05, momentum=0.9, dampening=0.1, use_combined_accum=False
        ),
        "combined": lambda: optim.SGD(parameters, lr=0.05, momentum=0.9, use_combined_accum=True),
        "adam": lambda: optim.Adam(parameters, lr=0.01),
        "adamw": lambda: optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
        "rmsprop": lambda: optim.RMSprop(parameters, lr=0.01, momentum=0.5),
    }
    return made[name]()


def tensors_of(value) -> list[torch.Tensor]:
    """Return the tensors in dicts and sequences, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach().clone()]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [one for part in value for one in tensors_of(part)] if isinstance(value, Container) else []
    )


def wrapped(case: Case, schedule: PipelineSchedule, names, queue):
    options = make_options(case.device_iterations, case.accumulation, seed=3)
    options.outputMode(case.output_mode).autoRoundNumIPUs(True).pipelineSchedule(schedule)
    if case.recomputation is not None:
        options._Popart.set("autoRecomputation", case.recomputation)
    if case.loss_scaling:
        options.Training.setAutomaticLossScaling(True)
    for number, ((mode, period, _), name) in enumerate(zip(case.anchors, names, strict=False)):
        options.anchorTensor(f"anchor{number}", name, mode, period)
    model = Model(case, queue)
    if not case.training:
        return poptorch.inferenceModel(model.eval(), options), None
    optimizer = optimizer_of(case.optimizer, model)
    return poptorch.trainingModel(model, options, optimizer), optimizer


def data(case: Case):
    torch.manual_seed(1)
    size = ROWS * case.device_iterations * case.accumulation
    return [torch.randint(0, CLASSES, (2, size)).unbind() for _ in range(2)]


def names_of(case: Case) -> list[str]:
    """Return the tensors to anchor: any that the model without a pipeline has."""
    if not case.anchors:
        return []
    queue = None if case.queue_at is None else poptorch.OutfeedQueue()
    executor, _ = wrapped(case, PipelineSchedule.Sequential, [], queue)
    executor.compile(*data(case)[0])
    names = executor.getTensorNames()
    executor.destroy()
    return [names[int(which * len(names))] for _, _, which in case.anchors]


def printed(text: str) -> dict[str, list[str]]:
    """Return the texts of the print and of its gradient: schedules run them in another order."""
    texts = re.findall(r"(printed\w*): (\(.*?\n\))", text, re.DOTALL)
    return {name: [one for other, one in texts if other == name] for name, _ in texts}


def results(case: Case, schedule: PipelineSchedule, names, capfd):
    """Return everything that two calls leave behind, by name; and the lanes."""
    queue = None if case.queue_at is None else poptorch.OutfeedQueue()
    executor, optimizer = wrapped(case, schedule, names, queue)
    capfd.readouterr()
    found = {"outputs": [tensors_of(executor(x, y)) for x, y in data(case)]}
    found["printed"] = printed(capfd.readouterr().err)
    for number, name in enumerate(names):
        found[name] = tensors_of(executor.getAnchoredTensor(f"anchor{number}"))
    if queue is not None:
        found["queue"] = tensors_of(queue.dequeue())
    found["state"] = tensors_of(executor.state_dict())
    if optimizer is not None:
        found["optimizer"] = tensors_of(optimizer.state_dict())
        assert found["optimizer"] or case.optimizer == "sgd"
    found["random numbers"] = executor.rng_state
    lanes = executor.compiled.executable.plan.lane_of_stage
    executor.destroy()
    return found, lanes


def equal(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize(
    "seed",
    [*range(PLAIN), *(pytest.param(n, marks=pytest.mark.slow) for n in range(PLAIN, ALL))],
)
def test_a_pipeline_has_the_bits_of_the_sequential_program(seed, threads, capfd, monkeypatch):
    load_late()
    case = Case.drawn(seed)
    threads(1)
    names = names_of(case)
    expected, _ = results(case, PipelineSchedule.Sequential, names, capfd)
    threads(case.threads)
    monkeypatch.setenv("POPSIM_STAGE_THREADS", str(case.lanes))
    found, lanes = results(case, case.schedule, names, capfd)
    assert max(lanes) < case.lanes
    assert found.keys() == expected.keys()
    assert bool(found["printed"]) == (case.print_at is not None)
    assert [name for name in found if not equal(found[name], expected[name])] == [], case


def test_the_drawn_pipelines_have_lanes():
    """Few of them run on one thread, or without a layer of each kind."""
    cases = [Case.drawn(seed) for seed in range(ALL)]
    several = [case for case in cases if min(case.lanes, case.threads) > 1]
    assert len(several) > ALL / 3
    for kind in LAYERS:
        assert sum(kind in case.layers for case in several) > ALL / 10
    for schedule in SCHEDULES:
        assert sum(case.schedule == schedule for case in several) > ALL / 20
