"""A compiled model in a file: its parts, and how they belong together."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from popsim_torch.arguments import ArgumentSpec, OutputSpec
from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error, UsageAssertionError
from popsim_torch.files.container import BadFileError, read_sections, write_sections
from popsim_torch.files.module import LoadedModule, unpack_module
from popsim_torch.files.optimizer import unpack_optimizer
from popsim_torch.files.parts import pack, unpack
from popsim_torch.files.program import pack_program, unpack_program
from popsim_torch.files.settings import pack_options, unpack_options
from popsim_torch.files.structures import (
    ExampleCall,
    pack_structures,
    unpack_call,
    unpack_outputs,
)
from popsim_torch.ir import Program, RunSettings
from popsim_torch.optim.plan import OptimizerPlan
from popsim_torch.optim.planning import OptimizerSettings
from popsim_torch.options import Options

__all__ = [
    "ExecutableFile",
    "StoredModel",
    "StoredProgram",
    "pack_executable",
    "write_executable",
]

_CONTENT = "a compiled model"

T = TypeVar("T")


@dataclass(frozen=True)
class StoredProgram:
    """The data to run a program, besides ``StoredModel``.

    Attributes:
        program: The program, the same on every machine.
        run: How the program runs.
        plan: The optimizer's updates; None for inference.
        call: A call like the one that compiled the program.
        outputs: The outputs of calls.
    """

    program: Program
    run: RunSettings
    plan: OptimizerPlan | None
    call: ExampleCall
    outputs: OutputSpec


@dataclass(frozen=True)
class StoredModel:
    """The data from which ``poptorch.load`` makes an executor, besides the program.

    Attributes:
        options: The options that were in use; not frozen.
        module: The model's parameters and buffers.
        optimizer: The optimizer; None for inference.
        settings: The values of the optimizer that were in use; None for inference.
        states: Tensors of the optimizer on the device, by name.
        rng_state: The state of the device's random numbers; None to start anew.
    """

    options: Options
    module: LoadedModule
    optimizer: torch.optim.Optimizer | None
    settings: OptimizerSettings | None
    states: dict[str, torch.Tensor]
    rng_state: list[int] | None


def pack_executable(
    program: Program,
    run: RunSettings,
    plan: OptimizerPlan | None,
    arguments: ArgumentSpec,
    outputs: OutputSpec,
    options: Options,
    rng_state: list[int] | None,
) -> dict[str, bytes]:
    """Return the sections that every file of a compiled model has.

    Args:
        program: The program, the same on every machine.
        run: How the program runs.
        plan: The optimizer's updates; None for inference.
        arguments: The structure of the arguments of calls.
        outputs: The outputs of calls.
        options: The options in use.
        rng_state: The state of the random numbers; None to leave it out.

    Raises:
        Error: A part contains something else than plain data.
    """
    return {
        **pack_program(program),
        **pack("run", (run, None if plan is None else plan.as_data()), "The optimizer"),
        **pack_structures(arguments, outputs),
        **pack_options(options),
        **pack("rng_state", rng_state, "rng_state"),
    }


def write_executable(path: Path, sections: Mapping[str, bytes]) -> None:
    """Write the file of a compiled model; see ``write_sections``."""
    write_sections(path, _CONTENT, sections)


class ExecutableFile:
    """The file of a compiled model, which has been read and checked.

    Args:
        path: The file.

    Raises:
        Error: The file is of another kind or damaged; or ``path`` is not a path.
        UsageAssertionError: Another version of the package wrote the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise Error(
                f"Got a {type(path).__name__}, {path!r:.100}, as the name of the file; pass the "
                "path that was given to save or compileAndExport."
            )
        self.path = path
        self._sections = read_sections(path, _CONTENT)

    def call(self) -> ExampleCall:
        """Return a call like the one that compiled the model.

        Raises:
            Error: The file has no call, or a file cannot hold its arguments.
        """
        return self._read(unpack_call)

    def program(self) -> StoredProgram:
        """Return the program and how it runs.

        Raises:
            Error: The file has no valid program.
        """

        def read(sections: Mapping[str, bytes]) -> StoredProgram:
            program = unpack_program(sections)
            run, plan = unpack(sections, "run")
            _check_run(program, run, plan)
            outputs = unpack_outputs(sections, len(program.outputs))
            return StoredProgram(program, run, plan, unpack_call(sections), outputs)

        return self._read(read)

    def bare_program(self) -> Program:
        """Return only the program, to compare it with another one: it may call any operator.

        Raises:
            Error: The file has no valid program.
        """
        return self._read(partial(unpack_program, runs=False))

    def model(self) -> StoredModel:
        """Return everything but the program.

        Raises:
            UsageAssertionError: The file was written with ``export_model=False``.
            Error: The file has no valid model.
        """
        if "model" not in self._sections:
            raise UsageAssertionError(
                f"{os.fspath(self.path)}: the file holds no model, since it was written with "
                "export_model=False. Wrap the model and call loadExecutable on the executor."
            )

        def read(sections: Mapping[str, bytes]) -> StoredModel:
            module = unpack_module(sections)
            optimizer = settings = None
            if "optimizer" in sections:
                optimizer, settings = unpack_optimizer(sections, module)
            states, rng_state = unpack(sections, "states"), unpack(sections, "rng_state")
            if not _is_table(states) or not _is_rng_state(rng_state):
                raise ValueError("its state is none")
            options = unpack_options(sections)
            return StoredModel(options, module, optimizer, settings, states, rng_state)

        return self._read(read)

    def _read(self, function: Callable[[Mapping[str, bytes]], T]) -> T:
        try:
            return function(self._sections)
        except Error as error:
            raise Error(f"{os.fspath(self.path)}: {error.message}") from error
        except Exception as error:  # a file with a correct checksum may still contain anything
            problem = str(error) or repr(error)
            raise BadFileError(self.path, f"{problem}. Export the model again.") from error


def _check_run(program: Program, run: object, plan: object) -> None:
    """Check that a program can run with some settings."""
    if not (isinstance(run, RunSettings) and isinstance(run.schedule, PipelineSchedule)):
        raise ValueError("it does not say how its program runs")
    if plan is None:
        return
    if not isinstance(plan, OptimizerPlan):
        raise ValueError("its weights are updated in no known way")
    for update in plan.updates:
        known = update.parameter in program.parameters and all(
            state.name in program.states for state in update.all_states
        )
        if not known:
            raise ValueError(f"its program does not update '{update.parameter}' as it says")


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(v, torch.Tensor) for v in value.values())


def _is_rng_state(value: object) -> bool:
    if value is None:
        return True
    limits = (2**64, 2**63)
    return (
        isinstance(value, list)
        and len(value) == len(limits)
        and all(
            type(number) is int and 0 <= number < limit
            for number, limit in zip(value, limits, strict=True)
        )
    )
