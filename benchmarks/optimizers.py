"""What does the update of an optimizer cost, and how exact is it?

A training step of a perceptron runs with each optimizer of PyTorch. The time of the update is that
of the ops that update weights and states, which ``model.profile`` tells; the rival is eager
PyTorch's own ``optimizer.step()`` with ``foreach=True``. Both have one thread and take turns. The
error is that of the weights after ten steps, against eager PyTorch in float64.

``--page docs/optimizers.md`` writes the page of the project that has this table.
"""

from __future__ import annotations

import copy
import inspect
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch
from benchmarks.common.clock import calls_per_round, seconds_per_call
from benchmarks.common.report import Table, describe_machine, make_parser
from popsim_torch.optim.settings import is_traced

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]

SIZES = (64, 512)
"""Features of each layer of the two perceptrons, of six layers."""
ROUND_SECONDS = 0.1
NUM_STEPS = 10

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "Adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam, amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.01}),
    "AdamW, maximize": (torch.optim.AdamW, {"lr": 0.01, "maximize": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05}),
    "Muon": (torch.optim.Muon, {"lr": 0.02}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "SGD, maximize": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
}
"""The optimizers of PyTorch that a program can step, with their arguments here."""


class Perceptron(nn.Module):
    """Layers of one size, and a loss."""

    def __init__(self, features: int, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(features, features) for _ in range(num_layers))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return the loss, a scalar."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return functional.mse_loss(x, target)


def make(name: str, module: nn.Module, **options: Any) -> torch.optim.Optimizer:
    """Make an optimizer of the table for a module."""
    kind, values = OPTIMIZERS[name]
    if "foreach" not in inspect.signature(kind).parameters:
        options.pop("foreach", None)
    parameters = [p for p in module.parameters() if kind is not torch.optim.Muon or p.dim() == 2]
    return kind(parameters, **{**values, **options})  # type: ignore[call-arg]


def error_of(name: str) -> float:
    """Return the largest error of a weight after some steps, against float64.

    It is relative to the largest weight of the same parameter.
    """
    torch.manual_seed(1)
    module = Perceptron(12, 3)
    wide = copy.deepcopy(module).double()
    x, target = torch.randn(NUM_STEPS, 8, 12), torch.randn(NUM_STEPS, 8, 12)
    model = poptorch.trainingModel(module, _options(), make(name, module))
    reference = make(name, wide)
    for one, goal in zip(x, target, strict=True):
        model(one, goal)
        reference.zero_grad()
        wide(one.double(), goal.double()).backward()
        reference.step()
    model.copyWeightsToHost()
    pairs = zip(module.parameters(), wide.parameters(), strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def states_of(name: str) -> list[str]:
    """Return the names of what an optimizer keeps for each parameter."""
    module = Perceptron(4, 1)
    model = poptorch.trainingModel(module, _options(), make(name, module))
    model.compile(torch.randn(2, 4), torch.randn(2, 4))
    suffix = "___layers.0.weight"
    program = model._device.require_compiled("states").program
    return [kind.removesuffix(suffix) for kind in program.states if kind.endswith(suffix)]


def times_of(name: str, features: int, rounds: int) -> tuple[float, float]:
    """Return the seconds of an update here, and of eager PyTorch's step."""
    torch.manual_seed(1)
    module, eager = Perceptron(features), Perceptron(features)
    x, target = torch.randn(8, features), torch.randn(8, features)
    model = poptorch.trainingModel(module, _options(), make(name, module))
    model(x, target)  # compiles
    optimizer = make(name, eager, foreach=True)
    eager(x, target).backward()
    optimizer.step()
    num_calls = calls_per_round(optimizer.step, ROUND_SECONDS)
    own, theirs = [], []
    for _ in range(rounds):
        own.append(model.profile(x, target, repeats=num_calls).by_phase()["update"])
        theirs.append(seconds_per_call(optimizer.step, num_calls))
    return statistics.median(own), statistics.median(theirs)


def _options() -> poptorch.Options:
    return poptorch.Options().showCompilationProgressBar(False)


def rows(names: Sequence[str], rounds: int) -> list[list[str]]:
    """Return the rows of the table for some optimizers."""
    found = []
    for name in names:
        module = Perceptron(4, 1)
        how = "its step, traced" if is_traced(make(name, module)) else "an op"
        ratios = []
        for features in SIZES:
            own, eager = times_of(name, features, rounds)
            ratios.append(f"{eager / own:.1f}")
        states = ", ".join(f"`{state}`" for state in states_of(name))
        found.append([name, how, states, f"{error_of(name):.0e}", *ratios])
    return found


HEADER = ["Optimizer", "Updated by", "States", "Error", *(f"Speed, {size}" for size in SIZES)]

PAGE = Path(__file__).parent / "common" / "optimizers_page.md"
"""What the page says around the table."""


def page(table: Sequence[Sequence[str]]) -> str:
    """Return the text of the project's page."""
    lines = [" | ".join(HEADER), " | ".join("---" for _ in HEADER)]
    lines += [" | ".join(row) for row in table]
    text = "\n".join(f"| {line} |" for line in lines)
    sizes = " and ".join(map(str, SIZES))
    around = PAGE.read_text(encoding="utf-8")
    return around.format(steps=NUM_STEPS, sizes=sizes, table=text, machine=describe_machine())


def main() -> None:
    """Print the table, or write the page."""
    parser = make_parser(__doc__, rounds=9)
    parser.add_argument("--page", type=Path, help="write the page of the project")
    parser.add_argument(
        "--names", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS), metavar="NAME"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = rows(arguments.names, arguments.rounds)
    if arguments.page is not None:
        arguments.page.write_text(page(found))
        return
    print(describe_machine())
    table = Table("Updates", HEADER)
    for row in found:
        table.row(*row)


if __name__ == "__main__":
    main()
