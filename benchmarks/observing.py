"""What does it cost to observe a training run, and to watch it?

Each contender trains with one device iteration per call. This package is measured without
observation; with six statistics, four counts and a histogram of all activations and gradients at
every step; with a budget of 2 % (``every=None``); with a fingerprint of the same tensors at every
step; and with ``Options.watch``. The records are read while the model runs, and dropped without
being decoded. A step in which nothing is observed runs the plain program, so every 16th step costs
a sixteenth of every step: the second table divides.

Eager PyTorch is measured without observation; with hooks that compute six statistics of the outputs
of all modules, of their gradients and of those of the weights; and with ``detect_anomaly``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

import popsim_torch as poptorch
from benchmarks.common.cases import Case, WithLoss, select
from benchmarks.common.clock import check_agreement, medians
from benchmarks.common.contenders import LEARNING_RATE, TOLERANCE, make_options, make_training_model
from benchmarks.common.report import Table, describe_machine, make_parser
from popsim_torch.observe.record import Record
from popsim_torch.statistics import Counts, Fingerprint, Histogram, Moments

CASES = select("MLP 32", "MLP 1000", "CNN 32", "ResNet 32", "transformer 8", "LSTM 16")

_TENSORS = poptorch.tensors.activations() | poptorch.tensors.gradients()
_ALL = (Moments(), Counts(), Histogram())


class _Dropped:
    """A sink that keeps nothing."""

    def write_records(self, records: Sequence[Record]) -> None:
        """Take records."""

    def close(self) -> None:
        """Do nothing."""


class OurRun:
    """Training on the device.

    Args:
        case: The model to train.
        change: Changes the options.
    """

    def __init__(self, case: Case, change: Callable[[poptorch.Options], object]) -> None:
        options = make_options()
        change(options)
        self._batches = case.make_batches(1)
        self.model = make_training_model(case, options)
        if options._observations:
            self.model.add_sink(_Dropped())

    def __call__(self) -> torch.Tensor:
        """Train one step; return the loss."""
        loss: torch.Tensor = self.model(*self._batches)[1]
        return loss


class EagerRun:
    """Training in eager PyTorch.

    Args:
        case: The model to train.
        hooks: Whether hooks compute statistics.
        anomalies: Whether autograd looks for NaN.
    """

    def __init__(self, case: Case, *, hooks: bool = False, anomalies: bool = False) -> None:
        self._batches = case.make_batches(1)
        self._module = WithLoss(case.make_body_in_dtype())
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=LEARNING_RATE)
        self._hooks, self._anomalies = hooks, anomalies
        self.found: dict[str, tuple[float, ...]] = {}
        if hooks:
            for name, module in self._module.named_modules():
                module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Callable[[object, object, object], None]:
        def look(_module: object, _args: object, output: object) -> None:
            for result in output if isinstance(output, tuple) else (output,):
                if isinstance(result, torch.Tensor):
                    self.found[name] = _six(result)
                    if result.requires_grad:
                        result.register_hook(self._gradient_hook(name))

        return look

    def _gradient_hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def look(gradient: torch.Tensor) -> None:
            self.found[f"Gradient___{name}"] = _six(gradient)

        return look

    def __call__(self) -> torch.Tensor:
        """Train one step; return the loss."""
        with torch.autograd.set_detect_anomaly(self._anomalies):
            self._optimizer.zero_grad()
            _, loss = self._module(*self._batches)
            loss.backward()
        if self._hooks:
            for name, parameter in self._module.named_parameters():
                assert parameter.grad is not None
                self.found[f"Gradient___{name}"] = _six(parameter.grad)
        self._optimizer.step()
        result: torch.Tensor = loss.detach()
        return result


def _six(tensor: torch.Tensor) -> tuple[float, ...]:
    x = tensor.detach().float()
    std, mean = torch.std_mean(x, correction=0)
    low, high = torch.aminmax(x)
    found = torch.stack((mean, std, low, high, x.norm(), x.abs().mean()))
    return tuple(found.tolist())


def make_runs(case: Case) -> dict[str, OurRun | EagerRun]:
    """Return all contenders."""
    return {
        "ours": OurRun(case, lambda options: None),
        "every step": OurRun(case, lambda options: options.observe(_TENSORS, *_ALL, every=1)),
        "budget 2 %": OurRun(case, lambda options: options.observe(_TENSORS, *_ALL)),
        "fingerprints": OurRun(
            case, lambda options: options.observe(_TENSORS, Fingerprint(), every=1)
        ),
        "watch": OurRun(case, lambda options: options.watch()),
        "eager": EagerRun(case),
        "eager, hooks": EagerRun(case, hooks=True),
        "eager, anomalies": EagerRun(case, anomalies=True),
    }


def percent(seconds: float, reference: float) -> float:
    """Return how much longer something took, in percent."""
    return 100 * (seconds / reference - 1)


def main() -> None:
    """Print the two tables."""
    arguments = make_parser(__doc__, rounds=15, cases=CASES).parse_args()
    print(describe_machine())
    rows: list[tuple[Case, dict[str, float], dict[str, OurRun | EagerRun]]] = []
    for case in arguments.cases:
        runs = make_runs(case)
        check_agreement(runs, num_calls=2, tolerance=TOLERANCE[case.dtype])
        rows.append((case, medians(runs, arguments.rounds), runs))
        for run in runs.values():
            if isinstance(run, OurRun):
                run.model.close_sinks()
    table = Table("A step, milliseconds", ["case", *rows[0][2]], "One device iteration per call.")
    for case, seconds, runs in rows:
        table.row(case.name, *(1e3 * seconds[name] for name in runs))
    table = Table(
        "What looking costs, percent of the step without it",
        [
            *("case", "every step", "every 16th", "every k-th", "k", "fingerprints", "watch"),
            *("eager hooks", "eager anomalies", "eager / every step"),
        ],
        "k is what a budget of 2 % chose. Targets: every 16th and k-th 2 %, fingerprints 12 %, "
        "watch 2 % (MLP 32) and 0.5 %, last column above 1.",
    )
    for case, seconds, runs in rows:
        budget = runs["budget 2 %"]
        assert isinstance(budget, OurRun)
        every = budget.model.observing().every
        each = percent(seconds["every step"], seconds["ours"])
        table.row(
            case.name,
            *(each, each / 16, each / (every or 1)),
            str(every),
            *(percent(seconds[name], seconds["ours"]) for name in ("fingerprints", "watch")),
            *(
                percent(seconds[name], seconds["eager"])
                for name in ("eager, hooks", "eager, anomalies")
            ),
            seconds["eager"] / seconds["every step"],
        )


if __name__ == "__main__":
    main()
