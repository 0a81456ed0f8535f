"""How much does it cost to record tensors, compared with eager PyTorch?

This package is measured three times: without anchors, with every weight gradient anchored (output
mode ``Final``), and with everything that ``getTensorNames()`` lists anchored. Eager PyTorch is
measured three times: without recording; with every ``.grad`` cloned; and with all ``.grad`` cloned,
forward hooks that clone the outputs of all modules, and hooks on those tensors that clone their
gradients. The tables count the tensors that this package records: it has names for more than the
outputs of modules.

Before the timing, the gradients that both recorded are compared.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

import popsim_torch as poptorch
from benchmarks.common.cases import Case, WithLoss, select
from benchmarks.common.clock import medians
from benchmarks.common.contenders import LEARNING_RATE, TOLERANCE, make_options, make_training_model
from benchmarks.common.report import Table, describe_machine, make_parser

CASES = select("MLP 32", "CNN 32", "transformer 8")

Recorded = dict[str, torch.Tensor]
GRADIENT = "Gradient___"


class EagerRun:
    """Training in eager PyTorch that records tensors.

    Args:
        case: The model to train.
        level: 0 records nothing, 1 the weight gradients, 2 also the outputs of modules and their
            gradients.
    """

    def __init__(self, case: Case, level: int) -> None:
        self._batches = case.make_batches(1)
        self._module = WithLoss(case.make_body_in_dtype())
        self._level = level
        self._optimizer = torch.optim.SGD(self._module.parameters(), lr=LEARNING_RATE)
        self.recorded: Recorded = {}
        if level == 2:
            for name, module in self._module.named_modules():
                module.register_forward_hook(self._recorder(name))

    def _recorder(self, name: str) -> Callable[[object, object, object], None]:
        def record(_module: object, _args: object, output: object) -> None:
            for result in output if isinstance(output, tuple) else (output,):
                if isinstance(result, torch.Tensor):
                    self.recorded[name] = result.detach().clone()
                    if result.requires_grad:
                        result.register_hook(self._gradient_recorder(name))

        return record

    def _gradient_recorder(self, name: str) -> Callable[[torch.Tensor], None]:
        def record(gradient: torch.Tensor) -> None:
            self.recorded[GRADIENT + name] = gradient.clone()

        return record

    def __call__(self) -> torch.Tensor:
        """Train one step; return the loss."""
        self._optimizer.zero_grad()
        _, loss = self._module(*self._batches)
        loss.backward()
        if self._level:
            for name, parameter in self._module.named_parameters():
                assert parameter.grad is not None
                self.recorded[GRADIENT + name] = parameter.grad.clone()
        self._optimizer.step()
        result: torch.Tensor = loss.detach()
        return result


class OurRun:
    """Training on the device with anchors.

    Args:
        case: The model to train.
        names: The tensors to anchor.
    """

    def __init__(self, case: Case, names: list[str]) -> None:
        options = make_options()
        for name in names:
            options.anchorTensor(name, name, poptorch.OutputMode.Final)
        self._names = names
        self._batches = case.make_batches(1)
        self.model = make_training_model(case, options)

    def __call__(self) -> torch.Tensor:
        """Train one step; return the loss."""
        loss: torch.Tensor = self.model(*self._batches)[1]
        return loss

    @property
    def recorded(self) -> Recorded:
        """Return the tensors that the anchors recorded in the last step."""
        return {name: self.model.getAnchoredTensor(name) for name in self._names}


def make_runs(case: Case) -> dict[str, EagerRun | OurRun]:
    """Return all contenders, each after one step."""
    ours = OurRun(case, [])
    ours()
    runs: dict[str, EagerRun | OurRun] = {"ours": ours}
    model = ours.model
    all_names = model.getTensorNames()
    weights = {GRADIENT + name for name, _ in model.model.named_parameters()}
    runs["ours, gradients"] = OurRun(case, [name for name in all_names if name in weights])
    runs["ours, everything"] = OurRun(case, all_names)
    for level, name in enumerate(("eager", "eager, gradients", "eager, everything")):
        runs[name] = EagerRun(case, level)
    for run in list(runs.values())[1:]:
        run()
    return runs


def check(runs: dict[str, EagerRun | OurRun], tolerance: float) -> None:
    """Compare the gradients that were recorded.

    Raises:
        AssertionError: The gradients differ, or some are missing.
    """
    expected = runs["eager, gradients"].recorded
    for name in ("ours, gradients", "ours, everything", "eager, everything"):
        recorded = runs[name].recorded
        for key, value in expected.items():
            torch.testing.assert_close(recorded[key], value, rtol=tolerance, atol=tolerance)


def overhead(seconds: float, reference: float) -> float:
    """Return how much longer something took, in percent."""
    return 100 * (seconds / reference - 1)


def main() -> None:
    """Print the two tables."""
    arguments = make_parser(__doc__, rounds=25, cases=CASES).parse_args()
    print(describe_machine())
    rows: list[tuple[Case, dict[str, float], dict[str, EagerRun | OurRun]]] = []
    for case in arguments.cases:
        runs = make_runs(case)
        check(runs, TOLERANCE[case.dtype])
        rows.append((case, medians(runs, arguments.rounds), runs))
    table = Table(
        "What looking at tensors costs",
        ["case", *(f"{name}, ms" for name in rows[0][2])],
        "One device iteration per call; anchors in output mode Final.",
    )
    for case, seconds, runs in rows:
        table.row(case.name, *(1e3 * seconds[name] for name in runs))
    table = Table(
        "Overheads, and ours with everything against eager with nothing",
        [
            "case",
            "gradients, ours %",
            "gradients, eager %",
            "everything, ours %",
            "everything, eager %",
            "tensors, ours",
            "tensors, eager",
            "eager / ours with everything",
        ],
        "Targets: gradients at most 10 % on MLP 32, 3 % on the transformer; last column above 1.",
    )
    for case, seconds, runs in rows:
        table.row(
            case.name,
            *(
                overhead(seconds[f"{who}, {what}"], seconds[who])
                for what in ("gradients", "everything")
                for who in ("ours", "eager")
            ),
            *(str(len(runs[f"{who}, everything"].recorded)) for who in ("ours", "eager")),
            seconds["eager"] / seconds["ours, everything"],
        )


if __name__ == "__main__":
    main()
