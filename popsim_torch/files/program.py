"""A program in a file: the form for every machine, before it is fitted to one machine."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch

from popsim_torch.dtypes import held_dtype
from popsim_torch.errors import InternalError
from popsim_torch.files.operators import check_operators
from popsim_torch.files.parts import pack, unpack
from popsim_torch.ir import Op, Program, TensorKind, graphs
from popsim_torch.passes.verify import verify
from popsim_torch.trace import TraceResult

__all__ = ["check_interface", "pack_program", "program_digest", "unpack_program"]

_PART = "program"


def pack_program(program: Program) -> dict[str, bytes]:
    """Return the sections of a program.

    Args:
        program: The program, after all passes for this form.
    """
    return pack(_PART, program, "The program")


def unpack_program(sections: Mapping[str, bytes], *, runs: bool = True) -> Program:
    """Return the program of a file, after a check of all rules of programs.

    Args:
        sections: The sections of the file.
        runs: Whether the program will run; otherwise it is only compared. A program that runs may
            only call the operators of PyTorch in ``files/operators.py``.

    Raises:
        ValueError: The sections contain no program, or it breaks a rule.
    """
    program = unpack(sections, _PART)
    if not isinstance(program, Program):
        raise ValueError("its program is none")
    if runs:
        check_operators(program.graph)
    try:
        # A program that is only compared may call any operator: its shapes are not computed.
        verify(program.graph, types=runs)
    except InternalError as error:
        raise ValueError(f"its program breaks a rule ({error.message})") from error
    _check_tables(program)
    return program


def check_interface(
    program: Program, inputs: Sequence[tuple[Sequence[int], torch.dtype]], traced: TraceResult
) -> None:
    """Check that a program has the inputs, outputs, parameters and buffers of a traced model.

    Args:
        program: The program of a file.
        inputs: Shape and dtype of each input of a micro-batch.
        traced: The trace.

    Raises:
        ValueError: The program differs from the model.
    """
    tensors = program.graph.tensors
    taken = [(t.shape, t.dtype) for t in tensors if t.kind == TensorKind.INPUT]
    if taken != [(tuple(shape), held_dtype(dtype)) for shape, dtype in inputs]:
        raise ValueError("its program takes other inputs than the model")
    if len(program.outputs) != len(traced.outputs.names):
        raise ValueError("its program returns other outputs than the model")
    held = {**traced.parameters, **traced.buffers}
    for name, variable in {**program.parameters, **program.buffers}.items():
        if name not in held or tuple(held[name].shape) != tensors[variable].shape:
            raise ValueError(f"its program uses '{name}' in a way that the model does not")


def program_digest(program: Program) -> str:
    """Return a digest that two programs share if and only if they compute the same.

    Line numbers of the user's code are ignored, because they change.
    """
    graph = program.graph.copy()
    for part in graphs(graph):
        part.ops = [_without_line(op) for op in part.ops]
    digest = hashlib.sha256()
    for name, data in pack(_PART, dataclasses.replace(program, graph=graph), "").items():
        digest.update(f"{name} {len(data)} ".encode() + data)
    return digest.hexdigest()


def _without_line(op: Op) -> Op:
    return dataclasses.replace(op, origin=dataclasses.replace(op.origin, source=""))


def _check_tables(program: Program) -> None:
    """Check the tables that the executor uses besides the graph."""
    tensors = program.graph.tensors

    def check(what: str, ids: Iterable[int], *kinds: TensorKind) -> None:
        for i in ids:
            if not 0 <= i < len(tensors) or (kinds and tensors[i].kind not in kinds):
                raise ValueError(f"tensor {i} of its program cannot be one of the {what}")

    variable = TensorKind.VARIABLE
    for what in ("parameters", "buffers", "states", "scalars"):
        check(what, getattr(program, what).values(), variable)
    check("outputs", program.outputs)
    check("losses", program.losses)
    check("changed inputs", program.changed_inputs.values())
    check("checkpoints", program.checkpoints)
    if not set(program.changed_state) <= {*program.parameters, *program.buffers}:
        raise ValueError("its program changes parameters or buffers that it does not have")
    num_inputs = sum(tensor.kind == TensorKind.INPUT for tensor in tensors)
    if not set(program.changed_inputs) <= set(range(num_inputs)):
        raise ValueError("its program changes inputs that it does not have")
    kept = [bool(op.attributes["keep"]) for op in program.returns]
    if len(program.outputs) + len(program.changed_inputs) != kept.count(False):
        raise ValueError("its program does not return what it computes")
    for anchor in program.anchors.values():
        check("anchors", [anchor.tensor])
        if anchor.kept is not None and not (0 <= anchor.kept < len(kept) and kept[anchor.kept]):
            raise ValueError("its program keeps nothing for an anchor")
    for tensor in tensors:
        value = tensor.value
        if (value is not None) != (tensor.kind == TensorKind.CONSTANT) or (
            value is not None
            and (tuple(value.shape) != tensor.shape or value.dtype != tensor.dtype)
        ):
            raise ValueError(
                f"tensor {tensor.id} of its program does not have the data that it needs"
            )
