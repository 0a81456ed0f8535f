"""Models with one planted fault each, and what the verdict must say about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import popsim_torch as poptorch


class Base(nn.Module):
    """A layer before the fault and one after it; the fault is in ``bad``."""

    def __init__(self, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.bad = Fault(fault)
        self.last = nn.Linear(4, 4)
        nn.init.eye_(self.first.weight)
        nn.init.zeros_(self.first.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.last(self.bad(self.first(x))), "mean")


class Fault(nn.Module):
    def __init__(self, fault: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fault(x)


@dataclass
class Planted:
    """A fault and the verdict about it.

    Attributes:
        make: Makes the model.
        expected: Fields of the verdict.
        rule: A part of the verdict's rule.
        inputs: Makes the inputs of the bad iteration.
        optimizer: Makes the optimizer.
        options: Changes the options.
    """

    make: Callable[[], nn.Module]
    expected: dict[str, Any]
    rule: str
    inputs: Callable[[], tuple[torch.Tensor, ...]] = lambda: (torch.zeros(2, 4),)
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1
    )
    options: Callable[[poptorch.Options], object] = field(default=lambda options: None)


def faulty(fault: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: Base(fault)


def filled(value: float) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.full((2, 4), value),)


FORWARD = {"source": "op", "layer": "bad", "phase": "forward", "micro_batch": 0, "iteration": 0}
BACKWARD = {**FORWARD, "phase": "backward"}


class HalfOverflow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        nn.init.constant_(self.fc.weight, 300.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.fc(x).float(), "mean")


class Norm(nn.Module):
    """The variance of one element is zero, and nothing is added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(1, eps=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.norm(self.fc(x).reshape(-1, 1)), "mean")


class Masked(nn.Module):
    """Attention in which all keys of the second row are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        scores = self.scores(x).masked_fill(mask, -torch.inf)
        return poptorch.identity_loss(scores.softmax(1) * x, "mean")


class BadWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        with torch.no_grad():
            self.fc.weight[2, 1] = torch.inf

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.fc(x), "mean")


class BadBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([1.0, torch.nan, 1.0, 1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.fc(x) * self.scale, "mean")


class Loop(nn.Module):
    """The third iteration of a loop divides by zero."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def body(y: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return y / n, n - 1

        y, _ = poptorch.for_loop(3, body, [self.fc(x), torch.full((1,), 2.0)])
        return poptorch.identity_loss(y, "mean")


class Cross(nn.Module):
    """A cross entropy whose logits have overflowed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        nn.init.constant_(self.fc.weight, 1e30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = self.fc(x) ** 2
        return nn.functional.cross_entropy(square, torch.tensor([0, 1]))


class LargeProduct(nn.Module):
    """All values and their gradients are finite, and the gradient of the first weight is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(128, 128, bias=False)
        self.last = nn.Linear(128, 4)
        nn.init.zeros_(self.first.weight)
        nn.init.constant_(self.last.weight, 10.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.last(self.first(x)), "sum")


class Staged(nn.Module):
    """The second stage takes the logarithm of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.first = poptorch.BeginBlock(nn.Linear(4, 4), ipu_id=0)
        self.second = poptorch.BeginBlock(Base(torch.log), ipu_id=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * 0)


class Plain(nn.Module):
    """No fault in the model itself."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layers or (nn.Linear(4, 4),)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.layers(x), "sum")


def with_nan() -> tuple[torch.Tensor, ...]:
    x = torch.ones(2, 4)
    x[1, 3] = torch.nan
    return (x,)


def accumulating(options: poptorch.Options) -> None:
    options.Training.gradientAccumulation(4)


def micro_batch_3() -> tuple[torch.Tensor, ...]:
    x = torch.ones(8, 4)
    x[6:] = 0
    return (x,)


def iterations(options: poptorch.Options) -> None:
    options.deviceIterations(8)


def iteration_5() -> tuple[torch.Tensor, ...]:
    x = torch.ones(16, 4)
    x[10:12] = -1
    return (x,)


def sgd(lr: float, **others: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, **others)


def adam(**values: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.Adam(model.parameters(), lr=0.1, **values)


PLANTED: dict[str, Planted] = {
    # --- Forward ---
    "division by zero": Planted(faulty(lambda x: 1 / x), FORWARD, "division by zero"),
    "zero by zero": Planted(faulty(lambda x: x / x), FORWARD, "undefined: 0 / 0"),
    "log of zero": Planted(faulty(torch.log), FORWARD, "log of zero"),
    "log of a negative number": Planted(
        faulty(torch.log), FORWARD, "log of a negative number", filled(-2.0)
    ),
    "log1p": Planted(faulty(torch.log1p), FORWARD, "log1p of -1", filled(-1.0)),
    "root of a negative number": Planted(
        faulty(torch.sqrt), FORWARD, "sqrt of a negative number", filled(-1.0)
    ),
    "inverse root of zero": Planted(faulty(torch.rsqrt), FORWARD, "division by zero"),
    "exp": Planted(faulty(torch.exp), FORWARD, "overflow of float32: exp(100)", filled(100.0)),
    "square": Planted(faulty(torch.square), FORWARD, "overflow of float32", filled(1e20)),
    "difference of infinities": Planted(
        faulty(lambda x: x.exp() - (2 * x).exp()), FORWARD, "overflow of float32", filled(100.0)
    ),
    "mean of large numbers": Planted(
        faulty(lambda x: x.mean(1, keepdim=True).expand(-1, 4)),
        FORWARD,
        "overflow of float32 inside of the op: float64 gives",
        filled(3e38),
    ),
    "mask that is read": Planted(
        faulty(lambda x: x * x.masked_fill(x == 0, torch.inf)), FORWARD, "undefined: 0 * inf"
    ),
    "float16": Planted(
        lambda: HalfOverflow().half(),
        {"source": "op", "layer": "fc", "phase": "forward", "more_precision_helps": True},
        "overflow of float16",
        lambda: (torch.full((2, 4), 100.0, dtype=torch.float16),),
    ),
    "row of a mask": Planted(
        Masked,
        {"source": "op", "phase": "forward", "op": "softmax", "index": (1, 0)},
        "undefined",
        lambda: (torch.ones(2, 4), torch.tensor([[False] * 4, [True] * 4])),
    ),
    "overflow before a loss": Planted(
        Cross, {"source": "op", "phase": "forward"}, "overflow of float32", filled(1.0)
    ),
    "norm of one element": Planted(Norm, {"source": "op", "layer": "norm"}, "", filled(1.0)),
    "loop": Planted(Loop, {"source": "op", "phase": "forward", "op": "div"}, "division by zero"),
    # --- Backward ---
    "gradient of a root": Planted(faulty(torch.sqrt), BACKWARD, "division by zero"),
    "gradient behind where": Planted(
        faulty(lambda x: torch.where(x > 0, x.log(), x)), {"source": "op", "layer": "bad"}, ""
    ),
    "gradient of a norm": Planted(
        faulty(lambda x: x * x.pow(0.5).sum()), BACKWARD, "division by zero"
    ),
    # --- Given ---
    "NaN in data": Planted(
        Plain, {"source": "input", "index": (1, 3), "tensor": "input"}, "came in through", with_nan
    ),
    "infinite weight": Planted(
        BadWeight,
        {"source": "parameter", "index": (2, 1), "tensor": "fc.weight"},
        "came in through the parameter",
        filled(1.0),
    ),
    "NaN in a buffer": Planted(
        BadBuffer, {"source": "buffer", "index": (1,), "tensor": "scale"}, "came in", filled(1.0)
    ),
    # --- Updates ---
    "exploding learning rate": Planted(
        Plain, {"source": "op", "phase": "update"}, "", filled(1e5), sgd(1e35)
    ),
    "product of an update": Planted(
        LargeProduct,
        {"source": "op", "tensor": "Gradient___first.weight", "phase": "backward"},
        "overflow of float32",
        lambda: (torch.full((2, 128), 1e38),),
        sgd(1e-30),
    ),
    "Adam without eps": Planted(
        Plain, {"source": "op", "phase": "update"}, "", filled(0.0), adam(eps=1e-60)
    ),
    # --- Positions ---
    "micro-batch 3 of 4": Planted(
        faulty(lambda x: 1 / x),
        {**FORWARD, "micro_batch": 3},
        "division by zero",
        micro_batch_3,
        options=accumulating,
    ),
    "iteration 5 of 8": Planted(
        faulty(torch.log),
        {**FORWARD, "iteration": 5},
        "log of a negative number",
        iteration_5,
        sgd(1e-4),
        options=iterations,
    ),
    "stage 1": Planted(
        Staged,
        {"source": "op", "stage": 1, "layer": "second/bad", "micro_batch": 0},
        "log of zero",
        lambda: (torch.ones(8, 4),),
        options=accumulating,
    ),
    "dropout": Planted(
        lambda: Plain(nn.Linear(4, 4), nn.Dropout(0.5), Fault(lambda x: x.log() - 1e-3)),
        {"source": "op", "layer": "layers/2", "phase": "forward"},
        "log of",
        filled(1.0),
    ),
    "velocities": Planted(
        faulty(lambda x: 1 / x),
        FORWARD,
        "division by zero",
        optimizer=lambda model: poptorch.optim.SGD(
            model.parameters(), lr=0.1, momentum=0.9, use_combined_accum=True
        ),
    ),
}
