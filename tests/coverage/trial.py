"""Tries a call on the device, and compares with eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from popsim_torch.files.operators import foreign_operators
from popsim_torch.ir import walk_all
from tests.coverage import eager
from tests.coverage.call import Call, is_inexact, tensor_leaves, weighted
from tests.coverage.compare import draws_problem, types_problem, values_problem
from tests.coverage.outcome import Outcome


class _Model(nn.Module):
    """A call as a model.

    Args:
        call: The call. If gradients are compared, its tensors that need one are parameters.
        known: Whether integers are buffers, whose values the trace knows, and not arguments.
        gradient: Whether gradients are compared.
        trained: Whether a loss that does not depend on the call is returned, too.
    """

    def __init__(
        self, call: Call, *, known: bool, gradient: bool = False, trained: bool = False
    ) -> None:
        super().__init__()
        self.call = [call]
        self.module = call.module
        self.gradient = gradient
        self.dummy = nn.Parameter(torch.zeros(2)) if trained else None
        self.arguments: list[torch.Tensor] = []
        self._places: list[str] = []
        for i, value in enumerate(call.tensors()):
            if gradient and value.requires_grad:
                self.register_parameter(f"w{i}", nn.Parameter(value.detach()))
                self._places.append(f"w{i}")
            elif known and not is_inexact(value):
                self.register_buffer(f"k{i}", value)
                self._places.append(f"k{i}")
            else:
                self.arguments.append(value.detach())
                self._places.append("")

    def forward(self, *args: torch.Tensor) -> Any:
        given = iter(args)
        result = self.call[0]([getattr(self, p) if p else next(given) for p in self._places])
        if self.dummy is not None:
            return result, poptorch.identity_loss(self.dummy.sum(), reduction="none")
        if not self.gradient:
            return result
        loss = weighted(self.call[0].keep(result))
        return poptorch.identity_loss(loss, reduction="none")


def try_forward(call: Call) -> Outcome:
    """Compare the results of a call."""
    try:
        expected = eager.results(call)
    except eager.NothingToCompare as nothing:
        return nothing.outcome
    return _with_integers(call, partial(_forward, call, expected, eager.is_random(call)))


def _forward(call: Call, expected: list[torch.Tensor], drawn: bool, known: bool) -> Outcome:
    outcome = _run_forward(call, expected, drawn=drawn, known=known, trained=False)
    if outcome.kind == "differs":
        # Dropout is off in an inference model, whatever the call says.
        trained = _run_forward(call, expected, drawn=drawn, known=known, trained=True)
        if trained.kind == "works":
            return Outcome(
                "works",
                "dropout is on in training models only",
                known,
                trained.ops,
                trained.foreign,
            )
    return outcome


def _run_forward(
    call: Call, expected: list[torch.Tensor], *, drawn: bool, known: bool, trained: bool
) -> Outcome:
    model = _Model(call, known=known, trained=trained)
    model.train(trained or call.module is None or call.module.training)
    if trained:
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.0)
        executor = poptorch.trainingModel(model, optimizer=optimizer)
    else:
        executor = poptorch.inferenceModel(model)

    def results() -> list[torch.Tensor]:
        found = tensor_leaves(executor(*model.arguments))
        if not trained:
            return found
        same = [a.numel() == e.numel() for a, e in zip(found, expected, strict=False)]
        return [
            a.reshape(e.shape) if fits else a
            for a, e, fits in zip(found, expected, same, strict=False)
        ]

    try:
        actual = results()
        if call.unwritten:
            problem = types_problem(expected, actual)
        elif drawn:
            problem = draws_problem(results, lambda: eager.results(call))
        else:
            problem = values_problem(expected, actual, eager.wide_results(call))
        return _compared(problem, known, executor)
    finally:
        executor.destroy()


def try_gradient(call: Call) -> Outcome:
    """Compare the gradients of a call with respect to all tensors that need one."""
    try:
        expected = eager.gradients(call)
    except eager.NothingToCompare as nothing:
        return nothing.outcome
    return _with_integers(call, partial(_gradient, call, expected, eager.is_random(call)))


def _gradient(call: Call, expected: dict[Any, torch.Tensor], drawn: bool, known: bool) -> Outcome:
    model = _Model(call, known=known, gradient=True)
    model.train(call.module is None or call.module.training)
    options = poptorch.Options()
    for key in expected:
        name = f"w{key}" if isinstance(key, int) else f"module.{key}"
        options.anchorTensor(str(key), f"Gradient___{name}")
    executor = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.0)
    )
    try:
        executor(*model.arguments)
        actual = [executor.getAnchoredTensor(str(key)) for key in expected]
        wanted = list(expected.values())
        actual = [a.reshape(w.shape) for a, w in zip(actual, wanted, strict=True)]
        if drawn:
            problem = types_problem(wanted, actual)
        else:
            exact = eager.wide_gradients(call)
            wide = [exact[key] for key in expected] if exact.keys() >= expected.keys() else None
            problem = values_problem(wanted, actual, wide)
        return _compared(problem, known, executor)
    finally:
        executor.destroy()


def _compared(problem: str, known: bool, executor: Any) -> Outcome:
    graph = executor.compiled.program.graph
    kinds = {op.kind for _, op in walk_all(graph)}
    foreign = tuple(foreign_operators(graph))
    kind = "differs" if problem else "works"
    return Outcome(kind, problem, known, tuple(sorted(kinds)), foreign)


def _with_integers(call: Call, attempt: Callable[[bool], Outcome]) -> Outcome:
    """Try with integers as arguments; if this is refused, as values that the trace knows."""
    outcome = _attempted(attempt, known=False)
    if outcome.kind == "error" and call.is_empty:
        return Outcome("empty", outcome.reason)
    if outcome.kind == "error" and any(not is_inexact(value) for value in call.given):
        again = _attempted(attempt, known=True)
        if again.kind != "error":
            return again
    if outcome.kind == "error" and eager.is_dynamic(call):
        return Outcome("dynamic", outcome.reason)
    return outcome


def _attempted(attempt: Callable[[bool], Outcome], *, known: bool) -> Outcome:
    try:
        return attempt(known)
    except poptorch.Error as error:
        return Outcome("raises" if isinstance(error, InternalError) else "error", str(error))
    except Exception as error:
        return Outcome("raises", f"{type(error).__name__}: {error}")
