"""The answers to conditions with which a step runs, and the joining of the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from popsim_torch.errors import Error
from popsim_torch.optimizer_steps.numbers import MOST_PATHS, Choices
from popsim_torch.optimizer_steps.traced_step import CellKey

__all__ = [
    "Outcome",
    "TooManyPaths",
    "every_combination",
    "joined",
    "joined_one_by_one",
    "one_by_one",
]


@dataclass
class Outcome:
    """The tensors that a run of a step leaves."""

    weights: list[torch.Tensor]
    cells: dict[CellKey, torch.Tensor]
    constants: dict[CellKey, Any]
    initial: dict[CellKey, torch.Tensor]
    numbers: dict[CellKey, str]  # what the host has: ``bool``, ``int`` or ``float``


Attempt = Callable[[list[bool]], tuple[Choices, Outcome | None]]
"""Runs the step with some answers; the outcome is None if it divides by zero."""
Found = list[tuple[Choices, Outcome]]


class TooManyPaths(Error):
    """A step has more paths than can be run."""


def every_combination(attempt: Attempt, name: str) -> Found:
    """Run a step once for each combination of answers.

    Args:
        attempt: Runs the step.
        name: The class of the optimizer.

    Raises:
        TooManyPaths: There are more than 64.
    """
    found: Found = []
    answers: list[bool] | None = []
    while answers is not None:
        if len(found) == MOST_PATHS:
            raise _too_many(name, [choices for choices, _ in found])
        choices, outcome = attempt(answers)
        if outcome is not None:
            found.append((choices, outcome))
        answers = choices.next_answers()
    return found


def one_by_one(attempt: Attempt, name: str) -> Found:
    """Run a step with usual answers, and then with another answer to one condition at a time.

    Args:
        attempt: Runs the step.
        name: The class of the optimizer.

    Raises:
        TooManyPaths: There are more conditions than paths are allowed.
    """
    answers: list[bool] | None = []
    first, outcome = attempt([])
    while outcome is None:
        answers = first.next_answers()
        if answers is None:
            return []
        first, outcome = attempt(answers)
    if len(first.answers) > MOST_PATHS:
        raise _too_many(name, [first])
    found = [(first, outcome)]
    for i, answer in enumerate(first.answers):
        choices, other = attempt([*first.answers[:i], not answer])
        if other is not None:
            found.append((choices, other))
    return found


def _too_many(name: str, choices: Sequence[Choices]) -> TooManyPaths:
    lines = dict.fromkeys(line for one in choices for line in one.lines)
    return TooManyPaths(
        f"The step of {name} asks for the values of so many conditions on numbers that change from "
        f"step to step that it has more than {MOST_PATHS} different paths. Use torch.where in "
        f"place of 'if' at {', '.join(lines)}."
    )


def joined(found: Found) -> Outcome:
    """Choose, on the device, between the results of runs with all combinations of answers."""
    return _joined(found, 0)


def _joined(found: Found, depth: int) -> Outcome:
    if len(found) == 1:
        return found[0][1]
    condition = found[0][0].conditions[depth]
    sides = [[one for one in found if one[0].answers[depth] is side] for side in (True, False)]
    if not all(sides):  # the other side fails
        return _joined(sides[0] or sides[1], depth + 1)
    yes, no = (_joined(side, depth + 1) for side in sides)
    return _picked(condition, yes, no)


def joined_one_by_one(found: Found) -> Outcome:
    """Join the results of runs with one other answer each: they depend on all that counts.

    A choice between equal results depends on no condition, so results are not chosen between those
    of other choices, but added up. They are no update.
    """
    (first, usual), *others = found
    result = usual
    for choices, other in others:
        given = zip(first.answers, choices.answers, strict=False)
        place = next(i for i, (a, b) in enumerate(given) if a is not b)
        yes, no = (usual, other) if first.answers[place] else (other, usual)
        choice = _picked(first.conditions[place], yes, no)
        weights = [a + b for a, b in zip(result.weights, choice.weights, strict=True)]
        cells = {key: _added(tensor, choice.cells[key]) for key, tensor in result.cells.items()}
        result = replace(choice, weights=weights, cells=cells)
    return result


def _added(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return one.logical_or(other) if one.dtype == torch.bool else one + other


def _picked(condition: torch.Tensor, yes: Outcome, no: Outcome) -> Outcome:
    if yes.cells.keys() != no.cells.keys() or yes.constants != no.constants:
        raise Error(
            "The optimizer keeps other states after one branch of an 'if' than after the other. "
            "On the device, states are the same in every step."
        )

    def pick(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.where(condition.reshape(()), a, b.to(a.dtype))

    return Outcome(
        list(map(pick, yes.weights, no.weights)),
        {key: pick(tensor, no.cells[key]) for key, tensor in yes.cells.items()},
        yes.constants,
        yes.initial,
        yes.numbers | no.numbers,
    )
