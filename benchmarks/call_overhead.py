"""What does a call cost that has next to nothing to compute?

Three models: inference of ``x + 1`` on one element, on the device and in Python on the host
(``poptorch.CPU``), and a training step of one weight. Each is called
as a user does, and its native program is run directly, so that the difference is what Python adds.
Every model at batch size 32 pays this once per call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn

import popsim_torch as poptorch
from benchmarks.common.clock import check_agreement, medians
from benchmarks.common.contenders import LEARNING_RATE, make_options
from benchmarks.common.report import Table, describe_machine, make_parser
from popsim_torch import _native

ROUND_SECONDS = 0.02


class AddOne(nn.Module):
    """Adds one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x + 1``."""
        return x + 1


class AddOneOnHost(nn.Module):
    """Lets the host add one."""

    def __init__(self) -> None:
        super().__init__()
        self.add = poptorch.CPU(AddOne(), "add")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x + 1``."""
        result: torch.Tensor = self.add(x)
        return result


class OneWeight(nn.Module):
    """Learns a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        return poptorch.identity_loss(x * self.weight, "sum")


def eager_addition(x: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a call of eager PyTorch's ``x + 1``."""
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


def native_run(model: poptorch.PoplarExecutor, x: torch.Tensor) -> Callable[[], object]:
    """Return a run of a model's program without anything around it."""
    compiled, inputs = model.compiled, [x]
    return lambda: compiled.executable.run(inputs, compiled.host_code)


def empty_run() -> Callable[[], object]:
    """Return a run of a program that has no tensors and no ops."""
    config = _native.RunConfig(1, 1, False, "sequential")
    executable = _native.Executable(_native.Graph(), config, [])
    inputs: list[torch.Tensor] = []
    return lambda: executable.run(inputs)


def main() -> None:
    """Print the table."""
    arguments = make_parser(__doc__, rounds=51).parse_args()
    print(describe_machine())
    table = Table(
        "Time of a call, microseconds",
        ["model", "eager", "ours", "native program", "Python adds", "eager/ours"],
        "Targets: the empty native program below 15 us, Python adds less than 40 us.",
    )
    x = torch.ones(1)
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
        contenders = {"eager": eager, "ours": ours, "native": native_run(model, x)}
        times = medians(contenders, arguments.rounds, ROUND_SECONDS)
        eager_us, ours_us, native_us = (1e6 * times[key] for key in contenders)
        table.row(name, eager_us, ours_us, native_us, ours_us - native_us, eager_us / ours_us)
    empty_us = 1e6 * medians({"empty": empty_run()}, arguments.rounds, ROUND_SECONDS)["empty"]
    table.row("empty program", "", "", empty_us, "", "")


if __name__ == "__main__":
    main()
