"""Programs of small models as text, before they are fitted to a host: the same on every machine.

``make golden`` writes them anew; what has changed is read in review.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import _native
from popsim_torch.ir import program_text
from popsim_torch.passes import fuse_products

FOLDER = Path(__file__).parent / "programs"
ACCEPT = os.environ.get("POPSIM_ACCEPT_GOLDEN") == "1"
CLASSES = 3


class WithLoss(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x, y):
        out = self.body(x)
        return out, nn.functional.cross_entropy(out, y)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.fc = nn.Linear(8, CLASSES)

    def forward(self, x):
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.fc(self.norm(x + mixed).mean(1))


class LastStep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.fc = nn.Linear(5, CLASSES)

    def forward(self, x):
        return self.fc(self.lstm(x)[0][:, -1])


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(6, 6)
        self.fc = nn.Linear(6, CLASSES)

    def forward(self, x):
        def body(y):
            (y,) = poptorch.cond(y.sum() > 0, torch.neg, [y], torch.add, [y, x])
            return torch.tanh(self.step(y))

        return self.fc(poptorch.for_loop(4, body, [x])[0])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, CLASSES))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * 3 * 3, CLASSES),
    )


def stages() -> nn.Module:
    model = mlp()
    model[3] = poptorch.BeginBlock(model[3], "second", ipu_id=1)
    return model


def options() -> poptorch.Options:
    return poptorch.Options().showCompilationProgressBar(False)


def with_accumulation() -> poptorch.Options:
    chosen = options().deviceIterations(2)
    chosen.Training.gradientAccumulation(4)
    for mode in ("All", "Sum", "Final"):
        mode = poptorch.OutputMode[mode]
        chosen.anchorTensor(f"gradient, {mode.name}", "Gradient___body.0.weight", mode)
    chosen.anchorTensor("every", "body/0/Gemm:0", poptorch.OutputMode.EveryN, 2)
    chosen.anchorTensor("updated", "UpdatedVar___body.3.bias", poptorch.OutputMode.Final)
    return chosen


def pipelined() -> poptorch.Options:
    chosen = options()
    chosen.Training.gradientAccumulation(4)
    return chosen


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return poptorch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return poptorch.optim.Adam(module.parameters(), lr=0.1)


Case = tuple[
    Callable[[], nn.Module],
    tuple[int, ...],
    Callable[[], poptorch.Options],
    Callable[[nn.Module], torch.optim.Optimizer],
]
CASES: dict[str, Case] = {
    "mlp": (mlp, (6,), options, sgd),
    "cnn_with_batch_norm": (cnn, (3, 6, 6), options, sgd),
    "attention": (Attention, (5, 8), options, adam),
    "lstm": (LastStep, (7, 4), options, sgd),
    "loop_and_branch": (Repeated, (6,), options, sgd),
    "two_stages": (stages, (6,), pipelined, sgd),
    "accumulation_with_anchors": (mlp, (6,), with_accumulation, adam),
}


def compile_case(name: str) -> poptorch.PoplarExecutor:
    body, shape, make_options, make_optimizer = CASES[name]
    module, chosen = WithLoss(body()), make_options()
    micro_batches = chosen.device_iterations * chosen.Training.gradient_accumulation
    model = poptorch.trainingModel(module, chosen, make_optimizer(module))
    samples = 2 * micro_batches
    model.compile(torch.zeros(samples, *shape), torch.zeros(samples, dtype=torch.long))
    return model


def renumbered(text: str) -> str:
    """Number the values without a name in the order in which they appear.

    Their own numbers count what tracing has recorded, which depends on PyTorch's version.
    """
    numbers: dict[str, int] = {}
    return re.sub(r"%\d+", lambda match: f"%{numbers.setdefault(match[0], len(numbers))}", text)


@pytest.mark.parametrize("name", CASES)
def test_the_program_is_the_one_on_file(name):
    path = FOLDER / f"{name}.txt"
    text = program_text(compile_case(name).compiled.program, origins=False)
    if ACCEPT:
        path.write_text(text, encoding="utf-8")
    on_file = path.read_text(encoding="utf-8")
    assert renumbered(text) == renumbered(on_file), "run `make golden` and read the difference"


@pytest.mark.parametrize("name", CASES)
def test_the_program_does_not_depend_on_what_the_host_can_do(name, monkeypatch):
    before = _native.emulate_tile_units(True)
    with_all = compile_case(name)
    _native.emulate_tile_units(before)
    monkeypatch.setattr(fuse_products, "product_can_fuse", lambda *args, **kwargs: False)
    with_nothing = compile_case(name)
    assert with_nothing.program() == with_all.program()


def test_every_file_has_a_case():
    assert {path.stem for path in FOLDER.iterdir()} == set(CASES)
