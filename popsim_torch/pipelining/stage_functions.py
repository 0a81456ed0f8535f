"""Checks the functions that are the stages of a pipeline, and runs all of them once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.loops.contract import check_takes
from popsim_torch.stages import PipelineStage, flat_positions

__all__ = ["StageFunctions", "as_arguments", "call"]

StageFunction = Callable[..., Any]


def as_arguments(result: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the result of a stage as the arguments of the next one.

    Args:
        result: Nothing, one value, a tuple or list of values, or a dict of values by name.
    """
    if result is None:
        return (), {}
    if isinstance(result, tuple | list):
        return tuple(result), {}
    if isinstance(result, dict):
        return (), dict(result)
    return (result,), {}


@dataclass(frozen=True)
class StageFunctions:
    """The stages of a pipeline, in order. Each function is a stage.

    Attributes:
        groups: The functions at each position of the pipeline; several are concurrent stages.
    """

    groups: tuple[tuple[StageFunction, ...], ...]

    @classmethod
    def checked(cls, stages: object) -> StageFunctions:
        """Check and return the user's list of stages.

        Raises:
            UsageTypeError: The argument is not a list of functions, or of lists of functions.
            UsageValueError: The list has less than two entries, or one of them is empty.
        """
        if not isinstance(stages, list | tuple):
            raise UsageTypeError(
                f"pipeline: computational_stages is a {type(stages).__name__}. Pass a list with a "
                "function for each stage."
            )
        if len(stages) < 2:
            raise UsageValueError(
                f"pipeline: {len(stages)} stages are listed. A pipeline has two or more; for one "
                "stage call poptorch.repeat."
            )
        groups: list[tuple[StageFunction, ...]] = []
        for stage in stages:
            groups.append(_checked_group(sum(map(len, groups)), stage))
        return cls(tuple(groups))

    def __len__(self) -> int:
        """Return the number of stages."""
        return sum(map(len, self.groups))

    @property
    def positions(self) -> tuple[int, ...]:
        """The position of each stage in the pipeline; empty if no stages are concurrent."""
        return flat_positions([len(group) for group in self.groups])

    def _numbered(self) -> Iterator[tuple[range, tuple[StageFunction, ...]]]:
        """Yield the numbers and the functions of the stages at each position."""
        begin = 0
        for group in self.groups:
            yield range(begin, begin + len(group)), group
            begin += len(group)

    def devices(self, mapping: object) -> list[int] | None:
        """Check and return the IPU of each stage; None means that stage ``i`` is on IPU ``i``.

        Args:
            mapping: An int for each entry of the list of stages; a list of ints for a list.

        Raises:
            UsageTypeError: ``mapping`` is something else.
            UsageValueError: Its length differs from that of the list of stages, or the length of
                one of its lists from the number of concurrent stages.
        """
        if mapping is None:
            return list(range(len(self))) if self.positions else None
        if not isinstance(mapping, list | tuple):
            raise UsageTypeError(
                f"pipeline: device_mapping={mapping!r}. Pass an int for each stage."
            )
        if len(mapping) != len(self.groups):
            entries = "stages" if len(self.groups) == len(self) else "stages and lists of stages"
            raise UsageValueError(
                f"pipeline: device_mapping has {len(mapping)} entries for {len(self.groups)} "
                f"{entries}. Pass one for each."
            )
        return [
            ipu
            for entry, (numbers, _) in zip(mapping, self._numbered(), strict=True)
            for ipu in self._devices(numbers, entry)
        ]

    @staticmethod
    def _devices(numbers: range, entry: object) -> list[int]:
        """Return the IPUs of the stages at one position."""
        ids: list[Any] = list(entry) if isinstance(entry, list | tuple) else [entry]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise UsageTypeError(
                f"pipeline: device_mapping has {entry!r} for {_shown(numbers)}. Pass an int, or a "
                "list of ints for a list of concurrent stages."
            )
        if len(ids) != len(numbers):
            wanted = "an int" if len(numbers) == 1 else f"a list of {len(numbers)} ints"
            raise UsageValueError(
                f"pipeline: device_mapping has {entry!r} for {_shown(numbers)}. Pass {wanted}."
            )
        if len(set(ids)) != len(ids):
            raise UsageValueError(
                f"pipeline: device_mapping has {entry!r} for {_shown(numbers)}. Concurrent stages "
                "need an IPU each."
            )
        return ids

    def check_captured(self, is_argument: Callable[[torch.Tensor], bool]) -> None:
        """Refuse tensors that would become constants without the user's intention.

        Args:
            is_argument: Whether a tensor has a new value in each call.

        Raises:
            Error: A stage's function uses a tensor that is not a weight.
        """
        for numbers, group in self._numbered():
            for number, function in zip(numbers, group, strict=True):
                for name, tensor in _mentioned_tensors(function):
                    if isinstance(tensor, nn.Parameter) or is_argument(tensor):
                        continue
                    raise Error(
                        f"pipeline: stage {number} uses the tensor '{name}', which would be a "
                        "constant of the program. Pass it in `inputs` and from stage to stage, "
                        "or make it a buffer or parameter of a module."
                    )

    def run(self, values: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Run all stages, each in its ``PipelineStage``; return the results of the last one.

        Args:
            values: The positional arguments of the first stage.
            named: The keyword arguments of the first stage.
        """
        args, kwargs = tuple(values), dict(named)
        before, result = "the inputs and the infeed", None
        for numbers, group in self._numbered():
            results = []
            for number, function in zip(numbers, group, strict=True):
                with PipelineStage(number):
                    results.append(call(f"stage {number}", before, function, args, kwargs))
            result = results[0] if len(group) == 1 else _joined(numbers, results)
            args, kwargs = as_arguments(result)
            before = _shown(numbers)
        return result


def _checked_group(first: int, stage: object) -> tuple[StageFunction, ...]:
    if not isinstance(stage, list | tuple):
        if callable(stage):
            return (stage,)
        raise UsageTypeError(
            f"pipeline: stage {first} is a {type(stage).__name__}. Pass a function, a module, or "
            "a list of concurrent stages."
        )
    if not stage:
        raise UsageValueError(f"pipeline: stage {first} is an empty list. Pass its functions.")
    for number, function in enumerate(stage, first):
        if isinstance(function, list | tuple):
            raise UsageTypeError(
                f"pipeline: stage {number} is a list inside of a list. Concurrent stages cannot "
                "be nested."
            )
        if not callable(function):
            raise UsageTypeError(
                f"pipeline: stage {number} is a {type(function).__name__}. Pass a list of "
                "functions for concurrent stages."
            )
    return tuple(stage)


def call(
    name: str,
    before: str,
    function: StageFunction,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call a function of the user with the results of the stage before it.

    Args:
        name: The description of the function, for messages.
        before: Where its arguments come from, for messages.
        function: The function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        UsageTypeError: The function takes other arguments.
    """
    given = f"{len(args)} value(s)" + (f" and {', '.join(kwargs)}" if kwargs else "")
    check_takes(function, f"pipeline: {name} gets {given} from {before},", args, kwargs)
    return function(*args, **kwargs)


def _shown(numbers: range) -> str:
    """Return the stages at one position, for messages."""
    first, last = numbers[0], numbers[-1]
    if first == last:
        return f"stage {first}"
    return f"the stages {first} {'and' if last == first + 1 else 'to'} {last}"


def _joined(numbers: range, results: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of concurrent stages in one list, in order."""
    joined: list[Any] = []
    for number, result in zip(numbers, results, strict=True):
        args, kwargs = as_arguments(result)
        if kwargs:
            raise UsageTypeError(
                f"pipeline: stage {number} returns a dict, and the results of concurrent stages "
                "are joined in order. Return a tuple."
            )
        joined += args
    return tuple(joined)


def _mentioned_tensors(function: StageFunction) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that a function's code names, except those inside of other objects."""
    if not inspect.isfunction(inspect.unwrap(function)):
        return
    found = inspect.getclosurevars(inspect.unwrap(function))
    for name, value in {**found.globals, **found.nonlocals}.items():
        if isinstance(value, torch.Tensor):
            yield name, value
