"""What does the update of an optimizer cost, and how exact is it?

A training step of a perceptron runs with each optimizer of PyTorch. The time of the update is the
difference to a step with plain SGD; the rival is eager PyTorch's own ``optimizer.step()`` with
``foreach=True``. The error is that of the weights after ten steps, against eager PyTorch in float64.

``--page docs/optimizers.md`` writes the page of the project that has this table.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch
from benchmarks.common.clock import medians
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
    module, plain, eager = (Perceptron(features) for _ in range(3))
    x, target = torch.randn(8, features), torch.randn(8, features)
    model = poptorch.trainingModel(module, _options(), make(name, module))
    base = poptorch.trainingModel(plain, _options(), torch.optim.SGD(plain.parameters(), 0.01))
    optimizer = make(name, eager, foreach=True)
    eager(x, target).backward()
    contenders: dict[str, Callable[[], object]] = {
        "own": lambda: model(x, target),
        "plain": lambda: base(x, target),
        "eager": optimizer.step,
    }
    found = medians(contenders, rounds, ROUND_SECONDS)
    return found["own"] - found["plain"], found["eager"]


def _options() -> poptorch.Options:
    return poptorch.Options().showCompilationProgressBar(False)


def rows(rounds: int) -> list[list[str]]:
    """Return the rows of the table."""
    found = []
    for name in OPTIMIZERS:
        module = Perceptron(4, 1)
        how = "its step, traced" if is_traced(make(name, module)) else "an op"
        ratios = []
        for features in SIZES:
            own, eager = times_of(name, features, rounds)
            ratios.append(f"{eager / max(own, 1e-7):.1f}")
        states = ", ".join(f"`{state}`" for state in states_of(name))
        found.append([name, how, states, f"{error_of(name):.0e}", *ratios])
    return found


HEADER = ["Optimizer", "Updated by", "States", "Error", *(f"Speed, {size}" for size in SIZES)]

PAGE = """# Optimizers

Every optimizer trains a model. SGD, Adam, AdamW, RMSprop and LAMB have update ops of their own. The
`step` of all others, of PyTorch or your own, is traced: it runs once on tensors without values, and
what it computes becomes part of the program.

```python
import torch
import popsim_torch as poptorch


class Lion(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(parameters, {{"lr": lr, "betas": betas}})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            slow, fast = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                average = state["exp_avg"]
                p.sub_(group["lr"] * (slow * average + (1 - slow) * p.grad).sign())
                average.mul_(fast).add_(p.grad, alpha=1 - fast)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, x, y):
        return torch.nn.functional.cross_entropy(self.fc(x), y)


net = Model()
optimizer = Lion(net.parameters())
model = poptorch.trainingModel(net, optimizer=optimizer)
model(torch.randn(8, 4), torch.randint(2, (8,)))
print([name for name in model.getTensorNames() if "exp_avg" in name and "weight" in name])
print(list(optimizer.state_dict()["state"][0]))
```

```text
['exp_avg___fc.weight', 'UpdatedVar___exp_avg___fc.weight']
['exp_avg']
```

## How it works

* **States** are what the step leaves in `self.state[p]`, `self.state[...]`, numbers of groups, and numbers in attributes.
  They begin with the value that the step gives them first. Each has a name, `<key>___<parameter>`, and can be anchored.
  A step whose first run differs (`momentum_buffer = grad.clone()`) has another state, `stepped`, which says so.
* **Numbers of groups** (`lr`, `betas`) are variables of the device: `setOptimizer` changes them without another compilation.
  If a condition of the step depends on one (`if weight_decay != 0`), a change that alters the answer compiles again.
* **Conditions on states** (`if step > 5`) are answered on the device: the step runs once for each answer, and the program
  chooses between the results. 32 different paths are the limit; `torch.where` has none.
* **Python's numbers**, such as `1 - beta ** step` and `math.sqrt(...)`, are computed in float64, as Python does.
* **The dictionary** of `state_dict()` is PyTorch's own, for all optimizers but those of `poptorch.optim`. It goes to eager
  PyTorch and back, and `load_state_dict` takes effect in the next call.
* Parameter groups, gradient accumulation, replicas, pipelines, loss scaling (an attribute `loss_scaling` of the optimizer)
  and device loops work as with other optimizers. Parameters in no group stay as they are, with a warning.
* Tensors of the step are float32, float16 or bfloat16. Where it asks for float64, it gets float32.

## What is refused, with the reason

* `LBFGS`, and others whose `step` needs a closure: it computes the loss as often as the values require.
* `SparseAdam`: gradients are dense.
* A step that keeps parameters in an attribute instead of taking them from `self.param_groups`; that adds states or changes
  their shape in a later step; or that needs a state as a plain number where only Python could use it (`range(step)`).

## Measured

*Error*: of the weights after {steps} steps of a small perceptron, against eager PyTorch in float64, relative to the largest
weight. *Speed*: eager PyTorch's `step()` with `foreach=True`, if it has that, divided by the time of the update here, for a
perceptron of six layers with {sizes} features. Adagrad and Muon of eager PyTorch round some numbers otherwise; Muon computes in
bfloat16, so its error is that of 8 bits.

{table}

{machine}
"""


def page(table: Sequence[Sequence[str]]) -> str:
    """Return the text of the project's page."""
    lines = [" | ".join(HEADER), " | ".join("---" for _ in HEADER)]
    lines += [" | ".join(row) for row in table]
    text = "\n".join(f"| {line} |" for line in lines)
    sizes = " and ".join(map(str, SIZES))
    return PAGE.format(steps=NUM_STEPS, sizes=sizes, table=text, machine=describe_machine())


def main() -> None:
    """Print the table, or write the page."""
    parser = make_parser(__doc__)
    parser.add_argument("--page", type=Path, help="write the page of the project")
    arguments = parser.parse_args()
    found = rows(arguments.rounds)
    if arguments.page is not None:
        arguments.page.write_text(page(found))
        return
    print(describe_machine())
    table = Table(HEADER)
    for row in found:
        table.add(*row)
    print(table)


if __name__ == "__main__":
    main()
