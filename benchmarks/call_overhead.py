"""How much does a call cost that computes almost nothing?

Three models: inference of ``x + 1`` on one element, on the device and in Python on the host
(``poptorch.CPU``), and a training step of one weight. Then functions with a loop of one iteration:
``x + 1``, and a training step of 4 to 200 layers, each with one weight and one bias. All are called
as a user calls them, and their native program is also run directly: the difference is the cost of
Python. Every model at batch size 32 has this cost once per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch import nn

import popsim_torch as poptorch
from benchmarks.common.clock import check_agreement, medians
from benchmarks.common.contenders import LEARNING_RATE, make_options
from benchmarks.common.report import Table, describe_machine, make_parser
from popsim_torch import _native
from popsim_torch.loops.program import DeviceLoopProgram

ROUND_SECONDS = 0.02
NUMS_LAYERS = (4, 10, 20, 200)


class AddOne(nn.Module):
    """A model that adds one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x + 1``."""
        return x + 1


class AddOneOnHost(nn.Module):
    """A model that lets the host add one."""

    def __init__(self) -> None:
        super().__init__()
        self.add = poptorch.CPU(AddOne(), "add")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x + 1``."""
        result: torch.Tensor = self.add(x)
        return result


class OneWeight(nn.Module):
    """A model that learns a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        return poptorch.identity_loss(x * self.weight, "sum")


def eager_addition(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that computes ``x + 1`` in eager PyTorch."""
    module = AddOne()

    def call() -> torch.Tensor:
        with torch.inference_mode():
            result: torch.Tensor = module(x)
            return result

    return call


def eager_step(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a training step of one weight in eager PyTorch."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=LEARNING_RATE)

    def call() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x * weight).sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return call


def native_run(
    program: poptorch.PoplarExecutor | DeviceLoopProgram, inputs: list[torch.Tensor]
) -> Callable[[], object]:
    """Return a function that runs only the native program of a model or a loop."""
    compiled = program.compiled
    return lambda: compiled.executable.run(inputs, compiled.host_code)


def adding_function(x: torch.Tensor) -> poptorch.Function:
    """Return a function whose loop adds one."""

    @poptorch.function
    def add() -> torch.Tensor:
        result: torch.Tensor = poptorch.repeat(1, lambda value: value + 1, x)
        return result

    return add


def layers_and_step(num_layers: int, x: torch.Tensor) -> Callable[[], None]:
    """Return a training step of a model of some layers, for eager PyTorch and for a loop."""
    layers = [nn.Linear(1, 1) for _ in range(num_layers)]
    for layer in layers:  # the values stay the same for any number of steps
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    return step


def training_function(step: Callable[[], None]) -> poptorch.Function:
    """Return a function whose loop makes one training step."""

    @poptorch.function
    def train() -> None:
        poptorch.repeat(1, step)

    return train


def empty_run() -> Callable[[], object]:
    """Return a function that runs a program without tensors and ops."""
    config = _native.RunConfig(1, 1, False, "sequential")
    executable = _native.Executable(_native.Graph(), config)
    inputs: list[torch.Tensor] = []
    return lambda: executable.run(inputs)


Contenders = tuple[str, Callable[[], object], Callable[[], object], Callable[[], object]]
"""A row's name, and what it measures: eager PyTorch, ours, and our native program."""


def models(x: torch.Tensor) -> Iterator[Contenders]:
    """Yield the models, which compute the same as eager PyTorch."""
    adding = poptorch.inferenceModel(AddOne(), make_options())
    adding_on_host = poptorch.inferenceModel(AddOneOnHost(), make_options())
    module = OneWeight()
    training = poptorch.trainingModel(
        module, make_options(), poptorch.optim.SGD(module.parameters(), lr=LEARNING_RATE)
    )
    for name, eager, model in (
        ("inference of x + 1", eager_addition(x), adding),
        ("the same on the host", eager_addition(x), adding_on_host),
        ("training of one weight", eager_step(x), training),
    ):
        ours = functools.partial(model, x)
        check_agreement({"eager": eager, "ours": ours}, num_calls=3, tolerance=1e-6)
        yield name, eager, ours, native_run(model, [x])


def functions(x: torch.Tensor) -> Iterator[Contenders]:
    """Yield the functions and the training steps of eager PyTorch, each with its own model."""
    add, eager = adding_function(x), eager_addition(x)
    check_agreement({"eager": eager, "ours": add}, num_calls=3, tolerance=1e-6)
    yield "function: x + 1", eager, add, native_run(add.programs[0], [])
    for num_layers in NUMS_LAYERS:
        train = training_function(layers_and_step(num_layers, x))
        train()
        step = layers_and_step(num_layers, x)
        native = native_run(train.programs[0], [])
        yield f"function: training of {num_layers} layers", step, train, native


def main() -> None:
    """Print the table."""
    arguments = make_parser(__doc__, rounds=51).parse_args()
    print(describe_machine())
    table = Table(
        "Time of a call, microseconds",
        ["model", "eager", "ours", "native program", "Python adds", "eager/ours"],
        "Targets: the empty native program below 15 us, Python adds less than 40 us; a function's "
        "call below 12 us.",
    )
    x = torch.ones(1)
    for name, eager, ours, native in chain(models(x), functions(x)):  # one exists at a time
        contenders = {"eager": eager, "ours": ours, "native": native}
        times = medians(contenders, arguments.rounds, ROUND_SECONDS)
        eager_us, ours_us, native_us = (1e6 * times[key] for key in contenders)
        table.row(name, eager_us, ours_us, native_us, ours_us - native_us, eager_us / ours_us)
    empty_us = 1e6 * medians({"empty": empty_run()}, arguments.rounds, ROUND_SECONDS)["empty"]
    table.row("empty program", "", "", empty_us, "", "")


if __name__ == "__main__":
    main()
