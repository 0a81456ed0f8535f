"""The entry points for loops and branches in user code, while a model is traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx

from popsim_torch.errors import Error
from popsim_torch.trace.control.branches import BranchCall
from popsim_torch.trace.control.loops import LoopCall
from popsim_torch.trace.control.recording import (
    Body,
    BodyRecorder,
    Tensors,
    as_list,
    number,
    tensors_of,
    value_of,
)
from popsim_torch.trace.graph.origin import user_line

__all__ = ["ControlFlow"]


class ControlFlow:
    """Records loops and branches of one trace.

    Args:
        bodies: Records the functions.
    """

    def __init__(self, bodies: BodyRecorder) -> None:
        self._bodies = bodies

    def check(self, outputs: Tensors) -> None:
        """Check that no tensor from a body is used outside of the body.

        Raises:
            Error: A tensor is used outside.
        """
        self._bodies.check(outputs)

    def for_loop(
        self, name: str, count: int, body: Callable[..., Any], inputs: Sequence[Any]
    ) -> list[torch.Tensor]:
        """Repeat a function: see ``poptorch.for_loop``."""
        values = [self._bodies.scopes.traced(value) for value in inputs]
        recorded = self._bodies.record(name, body, values, values)
        _check_same(name, recorded.results, values)
        return LoopCall(self._bodies, recorded, values, count).run()

    def while_loop(
        self,
        name: str,
        condition: Callable[..., Any],
        body: Callable[..., Any],
        inputs: Sequence[Any],
        count: int = 2**63 - 1,
    ) -> list[torch.Tensor]:
        """Repeat a function as long as another function of the same values returns true."""
        values = [self._bodies.scopes.traced(number(value)) for value in inputs]
        goes_on = self._bodies.condition(name, condition(*values))

        def iteration(_goes_on: torch.Tensor, *arguments: torch.Tensor) -> list[torch.Tensor]:
            results = tensors_of(name, list(map(number, as_list(body(*arguments)))))
            results = [self._bodies.scopes.traced(result) for result in results]
            return [self._bodies.condition(name, condition(*results)), *results]

        values = [goes_on, *values]
        recorded = self._bodies.record(name, iteration, values, values)
        _check_same(name, recorded.results, values)
        call = LoopCall(self._bodies, recorded, values, count, conditional=True)
        return call.run()[1:]

    def cond(
        self,
        name: str,
        condition: Any,
        if_true: tuple[Callable[..., Any], Sequence[Any]],
        if_false: tuple[Callable[..., Any], Sequence[Any]],
    ) -> list[torch.Tensor]:
        """Call one of two functions: see ``poptorch.cond``."""
        flag = self._bodies.condition(name, condition)
        bodies: list[Body] = []
        arguments: list[Tensors] = []
        for function, inputs in (if_true, if_false):
            given = [
                self._bodies.scopes.traced(value) if isinstance(value, torch.Tensor) else value
                for value in inputs
            ]
            places = [i for i, value in enumerate(given) if isinstance(value, torch.Tensor)]

            def call(
                *tensors: torch.Tensor,
                function: Any = function,
                given: Any = given,
                places: Any = places,
            ) -> Any:
                values = list(given)
                for place, tensor in zip(places, tensors, strict=True):
                    values[place] = tensor
                return function(*values)

            tensors = [given[place] for place in places]
            like = [value_of(node) for node in bodies[0].results] if bodies else []
            bodies.append(self._bodies.record(name, call, tensors, like, carries=False))
            arguments.append(tensors)
        expected = [value_of(node) for node in bodies[0].results]
        _check_same(name, bodies[1].results, expected, "the second body", "the first body's")
        return BranchCall(self._bodies, flag, (bodies[0], bodies[1]), arguments).run()


def _check_same(
    name: str,
    results: Sequence[torch.fx.Node],
    expected: Tensors,
    body: str = "the body",
    what: str = "its arguments",
) -> None:
    """Check that the results of a body fit its inputs, or the results of another body."""
    if len(results) != len(expected):
        raise Error(
            f"{name}{user_line(' at ')}: {body} returns {len(results)} tensors and must return "
            f"{len(expected)}, as many as {what}."
        )
    for position, (result, other) in enumerate(zip(map(value_of, results), expected, strict=True)):
        if result.shape != other.shape or result.dtype != other.dtype:
            raise Error(
                f"{name}{user_line(' at ')}: result {position} of {body} is {_shown(result)} and "
                f"must be {_shown(other)}, as {what}. Convert it with .to(dtype), or reshape it."
            )


def _shown(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
