"""Says from the statistics of a training which layer fails first, and how."""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from matplotlib import colormaps
from matplotlib.figure import Figure

import popsim_torch as poptorch

LARGEST_RATIO = 0.1
"""An update explodes if its norm is more than this share of the norm of the weight."""
SMALLEST_SHARE = 1e-4
"""A gradient vanishes if its norm is less than this share of that of the largest layer."""
DEAD_SHARE = 0.25
"""A layer dies if the gradients of this share of its units are 0 up to the end."""

_PREFIX = "Gradient___"


@dataclass
class Layer:
    """The health of a layer with a weight and a bias.

    Attributes:
        name: The path of its module.
        steps: The observed steps.
        gradients: The norm of the gradient of its weight, by step.
        ratios: The norm of the update of the weight, as a share of the weight's own; by step.
        alive: Which units had a gradient of the bias that is not 0; by step, shape ``(units,)``.
    """

    name: str
    steps: list[int] = field(default_factory=list)
    gradients: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    alive: list[torch.Tensor] = field(default_factory=list)

    def dead(self) -> torch.Tensor:
        """Return the share of units that are dead from a step on up to the end, by step."""
        later = torch.stack(self.alive).flip(0).cummax(0).values.flip(0)
        return 1 - later.double().mean(1)


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a layer from a step on.

    Attributes:
        step: The first step.
        layer: The layer.
        kind: ``"explodes"``, ``"dies"`` or ``"vanishes"``.
        text: The numbers of that step.
        severity: How many times a limit is exceeded.
    """

    step: int
    layer: str
    kind: str
    text: str
    severity: float


def layers_of(records: Iterable[poptorch.Record], learning_rate: float) -> list[Layer]:
    """Return the layers in the order of the network.

    Args:
        records: The statistics of weights and of their gradients; samples of the gradients of
            biases.
        learning_rate: That of plain SGD, whose update is the gradient times this number.
    """
    found: dict[str, Layer] = {}
    by_step: dict[int, dict[str, poptorch.Statistics]] = defaultdict(dict)
    for record in records:
        by_step[record.step][record.name] = record.statistics
    for step, named in sorted(by_step.items()):
        for name in reversed(named):  # the backward pass begins at the end of the network
            if not (name.startswith(_PREFIX) and name.endswith(".weight")):
                continue
            path = name.removeprefix(_PREFIX).removesuffix(".weight")
            layer = found.setdefault(path, Layer(path))
            layer.steps.append(step)
            layer.gradients.append(_norm(named[name]))
            weight = _norm(named[f"{path}.weight"])
            layer.ratios.append(learning_rate * layer.gradients[-1] / weight)
            layer.alive.append(named[f"{_PREFIX}{path}.bias"].samples != 0)
    return list(found.values())


def _norm(found: poptorch.Statistics) -> float:
    return math.inf if found.nans or found.infs else found.norm


def findings(layers: Iterable[Layer]) -> list[Finding]:
    """Return what is wrong, the first and the worst at the beginning."""
    layers = list(layers)
    found = [_explodes(layer) for layer in layers] + [_dies(layer) for layer in layers]
    found += [_vanishes(layer, layers) for layer in layers]
    return sorted((one for one in found if one), key=lambda one: (one.step, -one.severity))


def _explodes(layer: Layer) -> Finding | None:
    for step, ratio in zip(layer.steps, layer.ratios, strict=True):
        if not ratio <= LARGEST_RATIO:
            text = f"its update is {ratio:.2g} times as large as its weight"
            return Finding(step, layer.name, "explodes", text, ratio / LARGEST_RATIO)
    return None


def _dies(layer: Layer) -> Finding | None:
    for step, share in zip(layer.steps, layer.dead().tolist(), strict=True):
        if share >= DEAD_SHARE:
            units = len(layer.alive[0])
            text = f"{round(share * units)} of {units} units get no gradient any more"
            return Finding(step, layer.name, "dies", text, share / DEAD_SHARE)
    return None


def _vanishes(layer: Layer, layers: list[Layer]) -> Finding | None:
    for place, (step, norm) in enumerate(zip(layer.steps, layer.gradients, strict=True)):
        largest = max(other.gradients[place] for other in layers)
        if 0 < norm < SMALLEST_SHARE * largest < math.inf:
            text = f"its gradient is {norm / largest:.2g} of the largest one"
            return Finding(step, layer.name, "vanishes", text, SMALLEST_SHARE * largest / norm)
    return None


def report(layers: Iterable[Layer]) -> str:
    """Return a table of the layers, and the first layer that fails in each way."""
    layers = list(layers)
    row = "{:<8} {:>15} {:>10} {:>15} {:>10} {:>11}"
    lines = [row.format("Layer", "Gradient, first", "last", "Update, first", "last", "Dead units")]
    for one in layers:
        numbers = (one.gradients[0], one.gradients[-1], one.ratios[0], one.ratios[-1])
        texts = [f"{number:.2g}" for number in numbers]
        lines.append(row.format(one.name, *texts, f"{100 * one.dead()[-1]:.0f} %"))
    by_kind: dict[str, list[Finding]] = defaultdict(list)
    for one in findings(layers):
        by_kind[one.kind].append(one)
    for word, (first, *others) in zip(["First:", "Then:", "Then:"], by_kind.values(), strict=False):
        more = f" So do {len(others)} more, later or by less." if others else ""
        lines.append(f"{word} in step {first.step} {first.layer} {first.kind}: {first.text}.{more}")
    return "\n".join(lines if by_kind else [*lines, "Nothing explodes, vanishes or dies."])


def draw(layers: Iterable[Layer], title: str) -> Figure:
    """Draw the updates of the layers, and their dead units, by step."""
    layers = list(layers)
    figure = Figure(figsize=(8, 6), layout="constrained")
    upper, lower = figure.subplots(2, sharex=True, height_ratios=(3, 2))
    for layer, colour in zip(
        layers, colormaps["viridis"](np.linspace(0, 0.9, len(layers))), strict=True
    ):
        ratios = [one if 0 < one < math.inf else math.nan for one in layer.ratios]
        upper.plot(layer.steps, ratios, color=colour, label=layer.name)
        lower.plot(layer.steps, (100 * layer.dead()).tolist(), color=colour)
    upper.axhline(LARGEST_RATIO, color="tab:red", linestyle="--", linewidth=1)
    upper.annotate(
        "explodes above",
        (1, LARGEST_RATIO),
        xycoords=("axes fraction", "data"),
        xytext=(-3, 3),
        textcoords="offset points",
        ha="right",
        fontsize="x-small",
        color="tab:red",
    )
    upper.set(yscale="log", ylabel="norm of the update /\nnorm of the weight")
    lower.set(xlabel="step", ylabel="% of units dead\nfrom here on", ylim=(-3, 103))
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")
    figure.suptitle(title)
    return figure
