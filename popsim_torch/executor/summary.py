"""A model as a tree of modules, with data from its program for each module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from popsim_torch.errors import UsageValueError
from popsim_torch.executor.table import table
from popsim_torch.ir import Graph, Op, Phase, Program, Role, TensorKind, names, tensor_infos
from popsim_torch.passes.op_table import op_table
from popsim_torch.tensors import TensorInfo

__all__ = [
    "ModelSummary",
    "ModuleSummary",
    "forward_ops",
    "lies_in",
    "module_of",
    "summarise_model",
]

_HEADER = ("Module", "Output shape", "Parameters", "Bytes", "Activations", "Stage", "Anchor")
_OPTIONAL = ("Bytes", "Activations")
"""Columns that a narrow table leaves out."""


@dataclass(frozen=True)
class ModuleSummary:
    """A module of a model; all counts include the modules inside of it.

    Attributes:
        path: Its name in ``model.named_modules()``; empty for the whole model.
        type_name: The name of its class.
        depth: Its level in the tree: 0 for the whole model.
        outputs: The tensors that the rest of the model reads from it, once for each call. Empty if
            it computes nothing (for example a dropout in evaluation mode), if only the body of a
            loop or branch calls it, and if ``Options.disableModuleNamescope`` leaves modules out of
            names.
        parameters: Number of elements of its parameters. A shared parameter counts in each of its
            modules.
        trainable: Number of those elements that need a gradient.
        parameter_bytes: Memory of its parameters (bytes).
        activation_bytes: Memory of all activations in the forward pass of one micro-batch (bytes).
        stages: The pipeline stages that it runs on.
        names: The tensors that can be anchored and belong to this module, not to a module inside
            it.
    """

    path: str
    type_name: str
    depth: int
    outputs: tuple[TensorInfo, ...]
    parameters: int
    trainable: int
    parameter_bytes: int
    activation_bytes: int
    stages: tuple[int, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class ModelSummary:
    """The result of ``summary``: it prints as a table.

    Attributes:
        rows: One row for each module; the whole model is first, and inner modules follow their
            module.
        depth: Number of levels of the printed tree; None for all of them.
        width: Width of the printed table (characters); None for the width of the terminal.
    """

    rows: tuple[ModuleSummary, ...]
    depth: int | None = None
    width: int | None = None

    def __str__(self) -> str:
        shown = [r for r in self.rows if self.depth is None or r.depth <= self.depth]
        model = self.rows[0]
        rest = model.parameters - model.trainable
        lines = [
            f"Parameters: {model.parameters:,} ({model.trainable:,} trainable, {rest:,} not)",
            f"Bytes of parameters: {model.parameter_bytes:,}",
            f"Bytes of activations of a micro-batch: {model.activation_bytes:,}",
        ]
        return "\n".join(
            [table(_HEADER, [_cells(row) for row in shown], self.width, _OPTIONAL), "", *lines]
        )


def _cells(row: ModuleSummary) -> tuple[str, ...]:
    own = row.path.rpartition(".")[2]
    shapes = Counter(str(one.shape) for one in row.outputs)
    return (
        f"{'  ' * row.depth}{own} ({row.type_name})" if own else row.type_name,
        ", ".join(s if n == 1 else f"{n} x {s}" for s, n in shapes.items()) or "-",
        f"{row.parameters:,}" if row.parameters else "-",
        f"{row.parameter_bytes:,}" if row.parameters else "-",
        f"{row.activation_bytes:,}" if row.activation_bytes else "-",
        ", ".join(map(str, row.stages)) or "-",
        row.outputs[0].name if row.outputs else "-",
    )


def summarise_model(
    model: nn.Module, program: Program, depth: int | None = None, width: int | None = None
) -> ModelSummary:
    """Describe the modules of a model with data from its program.

    Args:
        model: The model that was compiled.
        program: The program of the model, the same on every machine.
        depth: Number of levels of the printed tree; None for all of them.
        width: Width of the printed table (characters); None for the width of the terminal.

    Raises:
        UsageValueError: A number is not an integer, or is too small.
    """
    for name, number, least in (("depth", depth, 0), ("width", width, 60)):
        if number is not None and (type(number) is not int or number < least):
            raise UsageValueError(
                f"summary: {name} must be an integer of {least} or more, or None, got {number!r}."
            )
    modules = dict(model.named_modules())
    outputs, names_of = _outputs(program, modules), _names(program, modules)
    ops = [(module_of(op.origin.scope, modules), op) for op in forward_ops(program.graph)]
    rows = []
    for path, module in modules.items():
        inside = [op for where, op in ops if lies_in(where, path)]
        parameters = list(module.parameters())
        rows.append(
            ModuleSummary(
                path,
                getattr(type(module), "_popsim_class", type(module)).__name__,
                path.count(".") + 1 if path else 0,
                tuple(tensor_infos(program, outputs[path])),
                sum(one.numel() for one in parameters),
                sum(one.numel() for one in parameters if one.requires_grad),
                sum(one.numel() * one.element_size() for one in parameters),
                _result_bytes(program.graph, inside),
                tuple(sorted({op.stage for op in inside})),
                tuple(names_of.get(path, ())),
            )
        )
    return ModelSummary(tuple(rows), depth, width)


def forward_ops(graph: Graph) -> Iterator[Op]:
    """Yield the forward ops that compute a part of the model."""
    definitions = op_table()
    for op in graph.ops:
        # An op that only looks at its inputs, such as a print, computes nothing.
        if op.phase > Phase.FORWARD or op.origin.backward or definitions[op.kind].sees_inputs:
            continue
        if any(one.kind == TensorKind.VALUE for one in graph.roots(op.outputs)):
            yield op  # the other ops write new values of buffers


def _result_bytes(graph: Graph, ops: Iterable[Op]) -> int:
    """Return the memory that the results of ops take."""
    roots = {one.id: one for op in ops for one in graph.roots(op.outputs)}
    made = [one for one in roots.values() if one.kind == TensorKind.VALUE]
    return sum(one.numel * one.dtype.itemsize for one in made)


def module_of(scope: str, modules: Container[str]) -> str:
    """Return the innermost module of a scope; ignore the scopes of the user around it."""
    path = ""
    for part in scope.split("/"):
        inner = f"{path}.{part}" if path else part
        path = inner if inner in modules else path
    return path


def lies_in(inner: str, outer: str) -> bool:
    """Return whether a module is another one, or inside of it."""
    return not outer or inner == outer or inner.startswith(f"{outer}.")


def _names(program: Program, modules: Container[str]) -> dict[str, list[str]]:
    """Return the names of tensors by the module that they belong to."""
    found: dict[str, list[str]] = {}
    for name in program.tensor_names():
        found.setdefault(module_of(names.scope_of(name), modules), []).append(name)
    return found


def _outputs(program: Program, modules: Collection[str]) -> dict[str, list[str]]:
    """Return the names of each module's outputs: the tensors that are read outside of it.

    If nothing is read outside of it, the last tensor that it computes.
    """
    graph = program.graph
    results = _results(program, modules)
    read_by: dict[int, set[str | None]] = {}
    for op in forward_ops(graph):
        reader = module_of(op.origin.scope, modules)
        for i in op.inputs:
            if i < 0:
                continue
            read_by.setdefault(i, set()).add(reader)
            if graph.tensors[i].kind == TensorKind.VIEW:
                # The input of a view counts as read by the module that makes the view.
                maker = results[i][1] if i in results else reader
                read_by.setdefault(graph.root_of(i).id, set()).add(maker)
    for i in program.outputs:
        read_by.setdefault(i, set()).add(None)
    first_names = {i: name for name, i in reversed(graph.names.items())}
    found = {"": [first_names[i] for i in program.outputs if i in first_names]}
    for path in modules:
        if not path:
            continue
        own = {i: name for i, (name, where) in results.items() if lies_in(where, path)}
        found[path] = [
            name
            for i, name in own.items()
            if any(r is None or not lies_in(r, path) for r in read_by.get(i, ()))
        ] or list(own.values())[-1:]
    return found


def _results(program: Program, modules: Container[str]) -> dict[int, tuple[str, str]]:
    """Return the results of forward, by id: the first name, and the module that computes it."""
    found: dict[int, tuple[str, str]] = {}
    for name, i in program.graph.names.items():
        if names.is_result(name) and program.graph.tensors[i].role == Role.VALUE:
            found.setdefault(i, (name, module_of(names.scope_of(name), modules)))
    return found
