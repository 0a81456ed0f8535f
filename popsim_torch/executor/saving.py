"""Writes compiled models to files and reads them, for the executor's methods."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

import torch
from torch import nn

from popsim_torch import logs
from popsim_torch.compile_hooks import around_compilation
from popsim_torch.errors import Error, InternalError
from popsim_torch.executor import host_weights
from popsim_torch.executor.compile import fit_to_host, note_program
from popsim_torch.executor.compile_log import CompileLog
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.dump import Dump
from popsim_torch.executor.host_tensors import named_tensors
from popsim_torch.executor.updates import make_plan
from popsim_torch.files.container import BadFileError
from popsim_torch.files.executable import ExecutableFile, StoredProgram
from popsim_torch.files.module import pack_module
from popsim_torch.files.operators import foreign_operators
from popsim_torch.files.optimizer import pack_optimizer
from popsim_torch.files.parts import pack
from popsim_torch.files.program import program_digest
from popsim_torch.ir import Program, program_text
from popsim_torch.optim.planning import OptimizerSettings
from popsim_torch.options import Options

__all__ = [
    "build_stored",
    "check_same_program",
    "pack_model",
    "program_of_file",
    "target_file",
    "warn_of_operators",
]


_DEFAULT_NAME = "model.poptorch"


def target_file(filename: str | os.PathLike[str]) -> Path:
    """Return the file to write for the user's path; create its folder.

    Args:
        filename: A file, or a folder that gets the file ``model.poptorch``.

    Raises:
        Error: It is not a path, or the folder cannot be created.
    """
    if not isinstance(filename, (str, os.PathLike)):
        raise Error(f"save: got a {type(filename).__name__} as the name of the file; pass a path.")
    path = Path(os.fsdecode(filename))
    if path.is_dir():
        path = path / _DEFAULT_NAME
        logs.python.warning("save: %s is a folder; the model is saved to %s.", filename, path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: the path is invalid on every system
        raise Error(f"save: the folder {path.parent} cannot be created ({error}).") from error
    return path


def warn_of_operators(program: Program) -> None:
    """Warn if ``poptorch.load`` will refuse a program, and name the operators."""
    foreign = foreign_operators(program.graph)
    if foreign:
        logs.python.warning(
            "save: the program calls %s, which no file may do by itself: poptorch.load will refuse "
            "the file. loadExecutable reads it into the wrapped model. Save weights with "
            "torch.save, and pass export_model=False to leave them out of this file.",
            ", ".join(foreign),
        )


def pack_model(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    settings: OptimizerSettings | None,
    states: dict[str, torch.Tensor],
) -> dict[str, bytes]:
    """Return the sections of a model and its optimizer.

    Args:
        module: The user's model; its weights are up to date.
        optimizer: The optimizer; None for inference.
        settings: The optimizer's values in use.
        states: The optimizer's tensors on the device, by name.

    Raises:
        Error: An object holds more than data.
    """
    with host_weights.without_sync(), torch.no_grad():
        hosts = named_tensors(module)
        plain = {id(tensor): host_weights.plain(tensor) for tensor in hosts.values()}
        sections = pack_module(module, {name: plain[id(t)] for name, t in hosts.items()})
        sections |= pack("states", states, "The optimizer's state")
        if optimizer is not None and settings is not None:
            names = {id(tensor): name for name, tensor in reversed(hosts.items())}
            sections |= pack_optimizer(optimizer, settings, names)
    return sections


def build_stored(
    path: str | os.PathLike[str], stored: StoredProgram, options: Options, warned: set[str]
) -> CompiledModel:
    """Fit the program of a file to this machine.

    Args:
        path: The path of the file, for messages.
        stored: The program of the file.
        options: The options of the executor.
        warned: The warnings that were already given for the executor.

    Raises:
        Error: The program breaks a rule, or cannot run on this machine.
    """
    try:
        with around_compilation():
            log = CompileLog(Dump.from_environment("loaded"))
            note_program(log, "read the file", stored.program)
            compiled = fit_to_host(
                stored.program,
                dataclasses.replace(
                    stored.run,
                    process=options.Distributed.processId,
                    num_processes=options.Distributed.numProcesses,
                ),
                stored.call.spec(warned),
                stored.outputs,
                stored.plan,
                log,
                watches=options._watching is not None,
                observations=options._observations,
            )
            compiled.connect(None)
            return compiled
    except Exception as error:  # a program from a file may contain errors that no check finds
        if isinstance(error, Error) and not isinstance(error, InternalError):
            raise
        raise BadFileError(path, f"its program cannot run here ({error}).") from error


def program_of_file(
    file: ExecutableFile,
    module: nn.Module,
    options: Options,
    settings: OptimizerSettings | None,
    warned: set[str],
) -> CompiledModel:
    """Return the program of a file for a model without code to compare it with.

    Args:
        file: The file.
        module: The module; its tensors must be those that the program uses.
        options: The options of the executor.
        settings: The values of the executor's optimizer; None for inference.
        warned: The warnings that were already given for the executor.

    Raises:
        Error: The tensors of the model or the optimizer do not fit those of the file.
    """
    stored = file.program()
    path = file.path
    if (stored.plan is None) != (settings is None):
        kinds = ("training", "inference")
        was, needed = kinds if stored.plan is not None else kinds[::-1]
        raise BadFileError(
            path, f"the file holds a program for {was}, the executor is for {needed}."
        )
    tensors = stored.program.graph.tensors
    present = named_tensors(module)
    for name, variable in {**stored.program.parameters, **stored.program.buffers}.items():
        shape = tensors[variable].shape
        if name not in present or tuple(present[name].shape) != shape:
            raise BadFileError(
                path,
                f"the file's program uses '{name}' of shape {shape}; this model does not have it.",
            )
    compiled = build_stored(path, stored, options, warned)
    if stored.plan is None or settings is None:
        return compiled
    trained = [update.parameter for update in stored.plan.updates]
    plan = make_plan(settings, options, module, trained, stored.plan.loss_scaling.name)
    stored.plan.check_replaceable(plan)
    if plan.without_values() != stored.plan.without_values():
        raise BadFileError(
            path, "the updates of the optimizer differ from those of the optimizer in the file."
        )
    return dataclasses.replace(compiled, plan=plan)


def check_same_program(file: ExecutableFile, program: Program) -> None:
    """Check that a model has the same program as a file.

    Args:
        file: The file.
        program: The program of the model.

    Raises:
        Error: The programs differ; the message shows the first difference.
    """
    stored = file.bare_program()
    if program_digest(stored) == program_digest(program):
        return
    raise BadFileError(
        file.path,
        "the file was made from another model, or with other options or another optimizer: its "
        f"program differs from that of this model. {_difference(stored, program)} The modules must "
        "be in the mode (train or eval) that they had when the file was made, and PyTorch must "
        "have the settings of that time, such as torch.set_float32_matmul_precision.",
    )


def _difference(stored: Program, program: Program) -> str:
    lines = [
        [line.strip() for line in program_text(p, origins=False).splitlines()]
        for p in (stored, program)
    ]
    for old, new in itertools.zip_longest(*lines, fillvalue=""):
        if old == new:
            continue
        if not old:  # a blank line ends a part of the program
            return f"The file ends where this model continues with '{new}'."
        if not new:
            return f"The file continues with '{old}' where this model ends."
        return f"The file has '{old}' where this model has '{new}'."
    return "The data of a constant, such as a buffer of integers, differs."
