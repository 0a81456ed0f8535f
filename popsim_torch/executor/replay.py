"""Repeats a device iteration op by op, and finds the op that computed the first bad number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch

from popsim_torch import _native
from popsim_torch.dtypes import dtype_name
from popsim_torch.executor.broken_rules import (
    FailedOp,
    exact_value,
    number_of,
    op_title,
    rule_of,
)
from popsim_torch.executor.build import build_executable
from popsim_torch.executor.compiled_model import CompiledModel
from popsim_torch.executor.host_code import HostCode
from popsim_torch.executor.number_trace import Origin, find_origin, op_at
from popsim_torch.files.capsule import Iteration
from popsim_torch.ir import Graph, Op, Program, Role, RunSettings, Tensor, TensorKind, graphs
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.passes.check_numbers import watched_tensors
from popsim_torch.passes.op_table import op_table
from popsim_torch.verdict import OperandNumbers, Verdict

__all__ = ["Replayer", "iteration_of_failed_run", "unknown_verdict"]

_ROLES = {
    Role.PARAMETER: "parameter",
    Role.BUFFER: "buffer",
    Role.STATE: "state",
    Role.ACCUMULATOR: "state",
    Role.HYPER_PARAMETER: "hyper-parameter",
}


def iteration_of_failed_run(compiled: CompiledModel, inputs: Sequence[torch.Tensor]) -> Iteration:
    """Return the device iteration that a check has just ended.

    Args:
        compiled: The program; its variables are those before the iteration.
        inputs: The tensors that the caller passed.
    """
    executable, program, run = compiled.executable, compiled.program, compiled.run
    training = compiled.plan is not None
    given = executable.bad_inputs(inputs)
    ids = [tensor.id for tensor in program.graph.of_kind(TensorKind.VARIABLE)]
    variables = dict(zip(ids, executable.read_all(ids), strict=True))
    if training:
        run = replace(run, loop=replace(run.loop, device_iterations=1))
    return Iteration(
        program,
        run,
        training,
        variables,
        given,
        executable.seed,
        executable.step,
        executable.num_iterations,
        () if compiled.queues is None else compiled.queues.shared,
    )


def unknown_verdict(number: int, problem: str, note: str = "") -> Verdict:
    """Return the verdict about an iteration whose repetition does not show the bad number.

    Args:
        number: The number of the device iteration.
        problem: Why it does not.
        note: What else there is to say.
    """
    return Verdict(
        tensor="",
        source="unknown",
        op="",
        phase="",
        layer="",
        line="",
        iteration=number,
        micro_batch=0,
        replica=0,
        stage=0,
        index=(),
        value=math.nan,
        rule=f"unknown: {problem}",
        operands=(),
        exact=None,
        noticed_in="",
        note=note,
    )


class Replayer:
    """Runs a program op by op, without its queues, prints and returns; compiled when needed.

    Args:
        program: The program, before it is fitted to a host.
        run: How it runs, see ``Iteration``.
        training: Whether it trains.
        shared: The positions of the inputs with one value that all micro-batches read.
        host_code: The host functions that it calls; None if it calls none.
    """

    def __init__(
        self,
        program: Program,
        run: RunSettings,
        *,
        training: bool,
        shared: tuple[int, ...] = (),
        host_code: HostCode | None = None,
    ) -> None:
        self._watched = watched_tensors(program, training=training)
        self._program = _muted(program)
        self._run = run
        self._training = training
        self._shared = shared
        self._host_code = host_code

    @cached_property
    def _executable(self) -> _native.Executable:
        executable = build_executable(
            self._program,
            self._run.loop,
            training=self._training,
            schedule=self._run.schedule,
            positions=self._run.positions,
            process=self._run.process,
            num_processes=self._run.num_processes,
        )
        if self._shared:
            places = [
                _native.InputPlace(shared=position in self._shared)
                for position, _ in enumerate(self._program.graph.of_kind(TensorKind.INPUT))
            ]
            with _native.translated_errors():
                executable.connect([], [], places)
        return executable

    def verdict(self, iteration: Iteration) -> Verdict:
        """Repeat an iteration, and return where its first bad number came from.

        Raises:
            Error: The run was stopped.
        """
        record = self._repeat(iteration, copied=-1)
        origin = find_origin(self._program, self._watched, record.executions)
        calls_host = self._host_code is not None
        note = "the repeated iteration called the functions of poptorch.CPU" if calls_host else ""
        if origin is None:
            problem = record.error or "the repeated iteration had no bad number"
            return unknown_verdict(iteration.number, problem, note)
        if origin.given is not None:
            return self._given(iteration, origin, origin.given, note)
        record = self._repeat(iteration, copied=origin.execution.number)
        return self._computed(iteration, origin, record, note)

    def _repeat(self, iteration: Iteration, *, copied: int) -> _native.NumberRecord:
        executable = self._executable
        with _native.translated_errors():
            executable.write_all(iteration.variables)
            executable.seed, executable.step = iteration.seed, iteration.step
            return executable.log_numbers(iteration.inputs, copied, self._host_code)

    def _computed(
        self, iteration: Iteration, origin: Origin, record: _native.NumberRecord, note: str
    ) -> Verdict:
        """Return the verdict about a number that an op computed."""
        execution = origin.execution
        graph, op = op_at(self._program, execution.path)
        bad = execution.results[0].tensor
        output = op.outputs.index(bad)
        result = record.results[output]
        assert result is not None
        failed = FailedOp(graph, op, record.operands, result, output, _first_bad(result))
        exact = exact_value(failed)
        notes = [note] if note else []
        if origin.given_infinity is not None:
            notes.append(self._about_infinity(iteration, origin, graph, origin.given_infinity))
        outer = self._program.graph.ops[execution.path[0]]
        if op is not outer:
            notes.append(f"the op is in the body of '{outer.name}'")
        return Verdict(
            tensor=_name(graph, graph.tensors[bad], op),
            source="op",
            op=op_title(op),
            phase=outer.phase.name.lower(),
            layer=op.origin.scope,
            line=op.origin.source,
            **self._when(iteration, origin),
            stage=outer.stage,
            index=failed.index,
            value=failed.value,
            rule=rule_of(failed, exact),
            operands=tuple(
                _numbers(
                    _operand_name(graph, graph.tensors[i], op), operand, failed.element(position)
                )
                for position, (i, operand) in enumerate(
                    zip(op.inputs, record.operands, strict=True)
                )
                if i != NO_TENSOR and operand is not None
            ),
            exact=exact,
            noticed_in=self._noticed(origin),
            note="; ".join(notes),
        )

    def _about_infinity(
        self, iteration: Iteration, origin: Origin, graph: Graph, tensor_id: int
    ) -> str:
        """Return where an infinity came from that no arithmetic made, such as one of a mask."""
        tensor = graph.root_of(tensor_id)
        name = _name(graph, tensor, None)
        if tensor.kind == TensorKind.VALUE or graph is not self._program.graph:
            return f"the infinity is in '{name}', which was filled with it"
        value = self._value_before(iteration, origin, tensor)
        place = "" if value is None else f" at {_first_bad(value)}"
        return f"the infinity came in with the {self._source(tensor)} '{name}'{place}"

    def _given(self, iteration: Iteration, origin: Origin, tensor_id: int, note: str) -> Verdict:
        """Return the verdict about a number that came in with an input or a variable."""
        execution = origin.execution
        graph, op = op_at(self._program, execution.path)
        tensor = graph.root_of(tensor_id)
        value = self._value_before(iteration, origin, tensor)
        source = self._source(tensor)
        index = () if value is None else _first_bad(value)
        number = math.nan if value is None else number_of(value[index])
        name = _name(graph, tensor, None)
        what = "NaN" if math.isnan(number) else "the infinity"
        place = f" at element ({', '.join(map(str, index))})" if index else ""
        return Verdict(
            tensor=name,
            source=source,
            op="",
            phase=op.phase.name.lower(),
            layer=op.origin.scope,
            line=op.origin.source,
            **self._when(iteration, origin),
            stage=op.stage,
            index=index,
            value=number,
            rule=f"{what} came in through the {source} '{name}'{place}",
            operands=() if value is None else (_numbers(name, value, None),),
            exact=None,
            noticed_in=self._noticed(origin),
            note="; ".join(filter(None, (f"first read by '{op.name}'", note))),
        )

    def _when(self, iteration: Iteration, origin: Origin) -> dict[str, int]:
        execution = origin.execution
        number = iteration.number if self._training else execution.iteration
        return {
            "iteration": number,
            "micro_batch": execution.micro_batch,
            "replica": execution.replica,
        }

    def _noticed(self, origin: Origin) -> str:
        graph = self._program.graph
        return _name(graph, graph.tensors[origin.noticed_in], None)

    def _source(self, tensor: Tensor) -> str:
        if tensor.kind == TensorKind.INPUT:
            return "input"
        if tensor.kind == TensorKind.VARIABLE:
            return _ROLES.get(tensor.role, "state")
        return "constant"

    def _value_before(
        self, iteration: Iteration, origin: Origin, tensor: Tensor
    ) -> torch.Tensor | None:
        """Return the value of a tensor that no op computed; None if only the device has it."""
        if tensor.kind == TensorKind.VARIABLE:
            found = iteration.variables[tensor.id]
            if tensor.replica_groups:
                found = found[tensor.replica_groups[origin.execution.replica]]
            return found.reshape(tensor.shape)
        if tensor.kind == TensorKind.INPUT and iteration.inputs:
            return self._input_value(iteration, origin, tensor)
        return tensor.value

    def _input_value(self, iteration: Iteration, origin: Origin, tensor: Tensor) -> torch.Tensor:
        graph, execution, loop = self._program.graph, origin.execution, self._run.loop
        position = [one.id for one in graph.of_kind(TensorKind.INPUT)].index(tensor.id)
        flat = iteration.inputs[position].reshape(-1)
        if position in self._shared:
            return flat.reshape(tensor.shape)
        micro_batch = execution.micro_batch if self._training else execution.iteration
        groups = loop.input_groups
        which = groups[execution.replica] if groups else execution.replica
        first = (micro_batch * loop.num_inputs + which) * tensor.numel
        return flat[first : first + tensor.numel].reshape(tensor.shape)


def _muted(program: Program) -> Program:
    """Return a copy of a program without the ops that only show values."""
    copy = program.copy()
    for graph in graphs(copy.graph):
        graph.ops = [op for op in graph.ops if not _only_shows(op)]
    return replace(copy, anchors={})


def _only_shows(op: Op) -> bool:
    """Return whether an op only gives values to the host."""
    entry = op_table()[op.kind]
    return entry.family == "host" and not entry.calls_host


def _first_bad(values: torch.Tensor) -> tuple[int, ...]:
    """Return the position of the first element that is NaN or infinite."""
    places = values.isfinite().logical_not().nonzero()
    return tuple(places[0].tolist()) if len(places) else ()


def _name(graph: Graph, tensor: Tensor, op: Op | None) -> str:
    """Return the name of a tensor; that of a view of it, or of the op that writes it, if none."""
    if tensor.name:
        return tensor.name
    root = graph.root(tensor)
    for name, i in graph.names.items():
        if graph.root_of(i) is root and graph.tensors[i].numel == tensor.numel:
            return name
    if root.name:
        return root.name
    writers = [one.name for one in graph.ops if root in graph.roots(one.outputs)]
    return next(filter(None, [op.name if op else "", *writers]), "an input of the body")


def _operand_name(graph: Graph, tensor: Tensor, op: Op) -> str:
    """Return the name of what an op reads; it is never that of the op's result."""
    name = _name(graph, tensor, None)
    if name != op.name or tensor.name or graph.root(tensor).name:
        return name
    return f"a step of {name}"


def _numbers(name: str, values: torch.Tensor, element: float | None) -> OperandNumbers:
    real = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
    wide = real.to(torch.float64).reshape(-1)
    finite = wide[wide.isfinite()]
    some = finite.numel() > 0
    return OperandNumbers(
        name=name,
        dtype=dtype_name(values.dtype),
        shape=tuple(values.shape),
        value=element,
        minimum=float(finite.min()) if some else math.nan,
        maximum=float(finite.max()) if some else math.nan,
        mean=float(finite.mean()) if some else math.nan,
        nans=int(wide.isnan().sum()),
        infs=int(wide.isinf().sum()),
    )
