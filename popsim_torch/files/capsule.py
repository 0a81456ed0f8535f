"""A capsule: the file with all that repeats a device iteration bit for bit, on any machine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from popsim_torch.enums import PipelineSchedule
from popsim_torch.errors import Error
from popsim_torch.files.container import BadFileError, read_sections, write_sections
from popsim_torch.files.parts import pack, unpack
from popsim_torch.files.program import pack_program, unpack_program
from popsim_torch.ir import Program, RunSettings, TensorKind

__all__ = ["Capsule", "Iteration", "read_capsule", "write_capsule"]

_CONTENT = "a device iteration"


@dataclass(frozen=True)
class Iteration:
    """All that repeats a device iteration; in inference, a call.

    Attributes:
        program: The program, before it is fitted to a host.
        run: How it runs; with one device iteration, if it trains.
        training: Whether it trains.
        variables: The value of each variable before the iteration, by tensor id.
        inputs: The inputs of the iteration: the values of all micro-batches one after the other.
        seed: The seed of the random numbers.
        step: The number of micro-batches begun before.
        number: The number of the device iteration over all calls, from 0.
        shared: The positions of the inputs with one value that all micro-batches read.
    """

    program: Program
    run: RunSettings
    training: bool
    variables: dict[int, torch.Tensor]
    inputs: list[torch.Tensor]
    seed: int
    step: int
    number: int
    shared: tuple[int, ...] = ()


@dataclass(frozen=True)
class Capsule:
    """The content of a capsule.

    Attributes:
        iteration: The device iteration.
        verdict: The text of the verdict when the file was written.
    """

    iteration: Iteration
    verdict: str


def write_capsule(path: Path, capsule: Capsule) -> None:
    """Write a capsule completely, or leave an existing file unchanged.

    Args:
        path: The file.
        capsule: The content.

    Raises:
        Error: The file cannot be written.
    """
    one = capsule.iteration
    facts = (one.run, one.training, one.seed, one.step, one.number, one.shared)
    sections = {
        **pack_program(one.program),
        **pack("facts", facts, "The settings of the run"),
        **pack("variables", one.variables, "The variables"),
        **pack("inputs", one.inputs, "The inputs"),
        **pack("verdict", capsule.verdict, "The verdict"),
    }
    write_sections(path, _CONTENT, sections)


def read_capsule(path: str | os.PathLike[str]) -> Capsule:
    """Read a capsule and check it; this runs no code from the file.

    Args:
        path: The file.

    Raises:
        Error: The file cannot be read, is damaged, or is not a capsule; or another version of the
            package wrote it.
    """
    sections = read_sections(path, _CONTENT)
    try:
        return _unpacked(sections)
    except Error as error:
        raise Error(f"{os.fspath(path)}: {error.message}") from error
    except Exception as error:  # a file with a correct checksum may still contain anything
        raise BadFileError(path, f"it has no device iteration ({error}).") from error


def _unpacked(sections: Mapping[str, bytes]) -> Capsule:
    program = unpack_program(sections)
    # Files of programs without shared inputs may have no positions of such inputs.
    run, training, seed, step, number, *rest = unpack(sections, "facts")
    if not (isinstance(run, RunSettings) and isinstance(run.schedule, PipelineSchedule)):
        raise ValueError("it does not say how its program runs")
    if type(training) is not bool or any(type(n) is not int for n in (seed, step, number)):
        raise ValueError("its numbers are none")
    variables, inputs = unpack(sections, "variables"), unpack(sections, "inputs")
    _check_values(program, variables, inputs)
    shared = _positions(rest, len(inputs))
    verdict = unpack(sections, "verdict")
    if not isinstance(verdict, str):
        raise ValueError("its verdict is none")
    iteration = Iteration(program, run, training, variables, inputs, seed, step, number, shared)
    return Capsule(iteration, verdict)


def _positions(rest: list[object], num_inputs: int) -> tuple[int, ...]:
    """Return the positions of the shared inputs, if the file has some."""
    if not rest:
        return ()
    (shared,) = rest
    allowed = range(num_inputs)
    if not isinstance(shared, tuple) or any(type(i) is not int or i not in allowed for i in shared):
        raise ValueError("its shared inputs are none of its inputs")
    return shared


def _check_values(program: Program, variables: object, inputs: object) -> None:
    kept = {t.id: t.host_shape for t in program.graph.of_kind(TensorKind.VARIABLE)}
    if not isinstance(variables, dict) or not isinstance(inputs, list):
        raise ValueError("it has no values")
    values = {*variables.values(), *inputs}
    if any(not isinstance(one, torch.Tensor) for one in values):
        raise ValueError("some of its values are no tensors")
    if {i: tuple(value.shape) for i, value in variables.items()} != kept:
        raise ValueError("its values are not those of its program")
