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
from popsim_torch.stages import PipelineStage

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
    """The stages of a pipeline, in order; each has one function, or several that are concurrent.

    Attributes:
        groups: The functions of each stage.
    """

    groups: tuple[tuple[StageFunction, ...], ...]

    @classmethod
    def checked(cls, stages: object) -> StageFunctions:
        """Check and return the user's list of stages.

        Raises:
            UsageTypeError: The argument is not a list of functions, or of lists of functions.
            UsageValueError: There are less than two stages, or one has no function.
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
        return cls(tuple(_checked_group(number, stage) for number, stage in enumerate(stages)))

    def __len__(self) -> int:
        return len(self.groups)

    def devices(self, mapping: object) -> list[int] | None:
        """Check the IPUs of all functions, and return the IPU of each stage.

        Args:
            mapping: One int for each stage, or a list of ints for a stage of concurrent functions.

        Raises:
            UsageTypeError: ``mapping`` is something else.
            UsageValueError: Its length differs from the number of stages or of functions.
        """
        if mapping is None:
            return None
        if not isinstance(mapping, list | tuple):
            raise UsageTypeError(
                f"pipeline: device_mapping={mapping!r}. Pass an int for each stage."
            )
        if len(mapping) != len(self):
            raise UsageValueError(
                f"pipeline: device_mapping has {len(mapping)} entries for {len(self)} stages. "
                "Pass one for each stage."
            )
        return [
            self._device(number, entry, len(group))
            for number, (entry, group) in enumerate(zip(mapping, self.groups, strict=True))
        ]

    @staticmethod
    def _device(number: int, entry: object, num_functions: int) -> int:
        """Return the IPU of a stage: for concurrent functions that of the first one."""
        is_list = isinstance(entry, list | tuple)
        ids: list[Any] = list(entry) if isinstance(entry, list | tuple) else [entry]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise UsageTypeError(
                f"pipeline: device_mapping has {entry!r} for stage {number}. Pass an int, or a "
                "list of ints for concurrent functions."
            )
        if len(ids) != num_functions or is_list != (num_functions > 1):
            raise UsageValueError(
                f"pipeline: device_mapping has {entry!r} for stage {number}, which has "
                f"{num_functions} function(s). Pass one IPU for each, as a list if there are "
                "several."
            )
        if len(set(ids)) != len(ids):
            raise UsageValueError(
                f"pipeline: device_mapping has {entry!r} for stage {number}. Concurrent functions "
                "need an IPU each."
            )
        return int(ids[0])

    def check_captured(self, is_argument: Callable[[torch.Tensor], bool]) -> None:
        """Refuse tensors that would become constants without the user's intention.

        Args:
            is_argument: Whether a tensor has a new value in each call.

        Raises:
            Error: A stage's function uses a tensor that is not a weight.
        """
        for number, group in enumerate(self.groups):
            for function in group:
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
        result: Any = None
        for number, group in enumerate(self.groups):
            with PipelineStage(number):
                results = [
                    call(f"stage {number}", _before(number), function, args, kwargs)
                    for function in group
                ]
                result = results[0] if len(group) == 1 else _joined(number, results)
            args, kwargs = as_arguments(result)
        return result


def _checked_group(number: int, stage: object) -> tuple[StageFunction, ...]:
    if not isinstance(stage, list | tuple):
        if callable(stage):
            return (stage,)
        raise UsageTypeError(
            f"pipeline: stage {number} is a {type(stage).__name__}. Pass a function, a module, or "
            "a list of concurrent functions."
        )
    if not stage:
        raise UsageValueError(f"pipeline: stage {number} is an empty list. Pass its functions.")
    for function in stage:
        if isinstance(function, list | tuple):
            raise UsageTypeError(
                f"pipeline: stage {number} has a list inside of its list. Concurrent functions "
                "cannot be nested."
            )
        if not callable(function):
            raise UsageTypeError(
                f"pipeline: stage {number} lists a {type(function).__name__}. Pass functions."
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


def _before(number: int) -> str:
    return f"stage {number - 1}" if number else "the inputs and the infeed"


def _joined(number: int, results: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of concurrent functions in one list, in order."""
    joined: list[Any] = []
    for result in results:
        args, kwargs = as_arguments(result)
        if kwargs:
            raise UsageTypeError(
                f"pipeline: a concurrent function of stage {number} returns a dict. Return a tuple."
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
