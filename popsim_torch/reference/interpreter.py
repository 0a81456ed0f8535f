"""Runs a program op by op: its memory, and the order of execution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from popsim_torch.anchors import num_returned, shape_of_entries
from popsim_torch.enums import OutputMode
from popsim_torch.errors import Error, InternalError, closest_names
from popsim_torch.ir import Graph, LoopCounts, Op, Phase, Program, Tensor, TensorKind
from popsim_torch.ir.graph import NO_TENSOR
from popsim_torch.reference.call import OPS, Call, Foreign, Position, Record, Run, widened


class Memory:
    """The memory of a graph's tensors; views use the memory of their base.

    Args:
        graph: The graph with the tensors.
        wide: Whether floating-point numbers are float64.
    """

    def __init__(self, graph: Graph, wide: bool) -> None:
        self._graph = graph
        self._wide = wide
        self._flat: dict[int, torch.Tensor] = {}

    def bind(self, tensor: Tensor, value: torch.Tensor) -> None:
        """Set the value of a tensor that owns its memory."""
        if value.numel() != tensor.numel:
            raise InternalError(
                f"reference: '{tensor.name}' has shape {list(tensor.shape)}, "
                f"its new value has {list(value.shape)}"
            )
        flat = torch.empty(tensor.numel, dtype=self._dtype(tensor))
        self._flat[tensor.id] = flat.copy_(value.detach().reshape(-1))

    def see(self, tensor_id: int, *, write: bool = False) -> torch.Tensor:
        """Return a tensor's memory with its shape and strides.

        Raises:
            InternalError: The memory is read, but nothing has written it.
        """
        tensor = self._graph.tensors[tensor_id]
        root = self._graph.root(tensor)
        if root.id not in self._flat:
            if not write and root.kind != TensorKind.VARIABLE:
                raise InternalError(
                    f"reference: '{tensor.name}' ({tensor_id}) is read and was never written"
                )
            self._flat[root.id] = torch.zeros(root.numel, dtype=self._dtype(root))
        flat = self._flat[root.id].view(self._dtype(tensor))
        return flat.as_strided(tensor.shape, tensor.strides, tensor.offset)

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return widened(tensor.dtype) if self._wide else tensor.dtype


def run_op(op: Op, graph: Graph, memory: Memory, run: Run) -> None:
    """Run one op.

    Raises:
        InternalError: There is no such op, or its results do not fit the program.
    """
    function = OPS.get(op.kind)
    if function is None:
        raise InternalError(f"reference: there is no op '{op.kind}' ('{op.name}')")
    stored = [None if i == NO_TENSOR else memory.see(i).clone() for i in op.inputs]
    dtypes = [None if i == NO_TENSOR else graph.tensors[i].dtype for i in op.outputs]

    def run_body(body: Graph, inputs: Sequence[torch.Tensor], at: Position) -> list[torch.Tensor]:
        return _run_body(body, inputs, run.at(at))

    call = Call(op, run, dtypes, stored, run_body)
    found = function(call, *(None if x is None else run.computed(x) for x in stored))
    results = [found] if isinstance(found, torch.Tensor) else list(found or [])
    for position, tensor_id in enumerate(op.outputs):
        if tensor_id == NO_TENSOR:
            continue
        value = results[position] if position < len(results) else None
        tensor = graph.tensors[tensor_id]
        if value is None or tuple(value.shape) != tensor.shape:
            shape = "nothing" if value is None else f"shape {list(value.shape)}"
            raise InternalError(
                f"reference: {op.kind} '{op.name}' gives {shape} for its output {position}, "
                f"which has shape {list(tensor.shape)}"
            )
        memory.see(tensor_id, write=True).copy_(value)


def _run_body(body: Graph, inputs: Sequence[torch.Tensor], run: Run) -> list[torch.Tensor]:
    """Return the results of a body; it keeps no values between its runs."""
    memory = Memory(body, run.wide)
    for tensor, value in zip(body.of_kind(TensorKind.INPUT), inputs, strict=True):
        memory.bind(tensor, value)
    *ops, end = body.ops
    for op in ops:
        run_op(op, body, memory, run)
    return [memory.see(i).clone() for i in end.inputs]


_ONCE = LoopCounts(1, 1)


class Compiled(Protocol):
    """The attributes of an executor's compiled model that ``Interpreter.like`` reads."""

    program: Program
    host_program: Program
    run: Any
    executable: Any


class Interpreter:
    """Runs a program, or one graph, micro-batch after micro-batch.

    The order is that of the schedule ``sequential``. Other schedules give the same values: weights
    only change in updates, and random numbers depend on the number of the micro-batch.

    Args:
        program: A program before or after the passes that fit it to a host.
        loop: How often a run executes it.
        seed: The seed of random numbers.
        wide: Whether to compute in float64 and round nothing: the values are nearly those of exact
            arithmetic. Random numbers, conditions and positions are computed from such values.
        foreign: Runs the ops ``custom`` and ``host_call``, whose code is not in the program.

    Attributes:
        step: Number of micro-batches begun; the next random numbers depend on it.
        record: The queues and prints of the last run.
    """

    def __init__(
        self,
        program: Program | Graph,
        loop: LoopCounts = _ONCE,
        *,
        seed: int = 0,
        wide: bool = False,
        foreign: Foreign | None = None,
    ) -> None:
        self._program = program if isinstance(program, Program) else Program(program)
        self._graph = self._program.graph
        self._loop = loop
        self._seed = seed
        self._wide = wide
        self._foreign = foreign
        self._memory = Memory(self._graph, wide)
        self._is_set_up = False
        self.step = 0
        self.record = Record()
        for tensor in self._graph.tensors:
            if tensor.value is not None:
                self._memory.bind(tensor, tensor.value)

    @classmethod
    def like(
        cls,
        executor: Any,
        *,
        wide: bool = False,
        host: bool = False,
        foreign: Foreign | None = None,
    ) -> Interpreter:
        """Return an interpreter of a compiled executor's program, in its present state.

        Weights, states, hyper-parameters and random numbers continue from those of the executor, so
        ``run`` computes the results of its next call.

        Args:
            executor: An executor that has compiled its model, and has a device.
            wide: See above.
            host: Whether to use the program that was fitted to this host; it has fewer tensors.
            foreign: See above.
        """
        compiled: Compiled = executor.compiled
        program = compiled.host_program if host else compiled.program
        executable = compiled.executable
        twin = cls(program, compiled.run.loop, seed=executable.seed, wide=wide, foreign=foreign)
        twin.step = executable.step
        for tensor in program.graph.of_kind(TensorKind.VARIABLE):
            twin.write(tensor.id, executable.read(tensor.id))
        return twin

    def write(self, tensor: int | str, value: torch.Tensor) -> None:
        """Set the value of a variable, by id or by name."""
        found = self._graph.tensors[self._id(tensor)]
        if found.kind != TensorKind.VARIABLE:
            raise Error(
                f"Interpreter.write: '{found.name or found.id}' is computed by the program, or is "
                "one of its inputs. Only variables keep a value between runs: weights, buffers, "
                "states and hyper-parameters."
            )
        if tuple(value.shape) != found.shape:
            raise Error(
                f"Interpreter.write: '{found.name or found.id}' has shape {list(found.shape)}, the "
                f"value has {list(value.shape)}."
            )
        self._memory.bind(found, value)

    def read(self, tensor: int | str) -> torch.Tensor:
        """Return a tensor after the last op that wrote it, by id or by name; float64 if wide."""
        return self._memory.see(self._id(tensor)).clone()

    def _id(self, tensor: int | str) -> int:
        if isinstance(tensor, int):
            return tensor
        if tensor not in self._graph.names:
            closest = ", ".join(map(repr, closest_names(tensor, [*self._graph.names])))
            raise Error(
                f"Interpreter: the program has no tensor named '{tensor}'"
                + (f"; the closest names are {closest}." if closest else ".")
                + " Some tensors exist only if they were anchored when the program was compiled."
            )
        return self._graph.names[tensor]

    def run(self, inputs: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Run the program once.

        Args:
            inputs: One tensor for each input, with all micro-batches along the first axis, or one
                tensor that all micro-batches share.

        Returns:
            The results of ``Program.returns`` in order, with the anchors.

        Raises:
            Error: The number of inputs is wrong, or an input has the wrong shape.
        """
        self._check_inputs(inputs)
        # Entries that this run does not return keep their values from an earlier run.
        self.record = Record(returns=self.record.returns)
        run = Run(self._loop, self._seed, self._wide, self._foreign, self.record)
        if not self._is_set_up:
            self._run_phase(Phase.SETUP, run)
            self._is_set_up = True
        steps = self._loop.gradient_accumulation
        for iteration in range(self._loop.device_iterations):
            for step in range(steps):
                self._bind_inputs(inputs, iteration * steps + step)
                at = run.at(Position(iteration, step, self.step))
                self.step += 1
                self._run_phase(Phase.FORWARD, at)
                self._run_phase(Phase.BACKWARD, at)
            self._run_phase(Phase.UPDATE, at)
            if self.record.ends:
                break
        return [self._returned(op) for op in self._program.returns]

    def _check_inputs(self, inputs: Sequence[torch.Tensor]) -> None:
        given = self._graph.of_kind(TensorKind.INPUT)
        if len(inputs) != len(given):
            raise Error(
                f"Interpreter.run: {len(inputs)} inputs were given; the program has {len(given)}: "
                f"{', '.join(tensor.name for tensor in given) or 'none'}."
            )
        count = self._loop.device_iterations * self._loop.gradient_accumulation
        for tensor, value in zip(given, inputs, strict=True):
            if value.numel() not in (tensor.numel, count * tensor.numel):
                raise Error(
                    f"Interpreter.run: '{tensor.name}' has shape {list(tensor.shape)} in each of "
                    f"{count} micro-batches, but the given tensor has {list(value.shape)}. Pass "
                    "all micro-batches along the first axis."
                )

    def _run_phase(self, phase: Phase, run: Run) -> None:
        stages: Mapping[int, list[Op]] = defaultdict(list)
        for op in self._graph.ops:
            if op.phase == phase:
                # An update is one action, whatever the stages of its ops.
                stages[op.stage if phase in (Phase.FORWARD, Phase.BACKWARD) else 0].append(op)
        for stage in sorted(stages, reverse=phase == Phase.BACKWARD):
            for op in stages[stage]:
                run_op(op, self._graph, self._memory, run)

    def _bind_inputs(self, inputs: Sequence[torch.Tensor], micro_batch: int) -> None:
        for tensor, value in zip(self._graph.of_kind(TensorKind.INPUT), inputs, strict=True):
            flat = value.detach().reshape(-1)
            first = 0 if flat.numel() == tensor.numel else micro_batch * tensor.numel
            self._memory.bind(tensor, flat[first : first + tensor.numel])

    def _returned(self, op: Op) -> torch.Tensor:
        """Return the tensor that an anchor op has returned; zeros if it has not run."""
        attributes: Any = op.attributes
        shape, loop = self._graph.tensors[op.inputs[0]].shape, self._loop
        sizes = loop.device_iterations, loop.gradient_accumulation, 1
        mode, period = OutputMode[attributes["mode"]], attributes["period"]
        count = num_returned(mode, period, *sizes, any_period=True)
        dtype = getattr(torch, attributes["dtype"])
        dtype = widened(dtype) if self._wide else dtype
        whole = torch.zeros((count, *shape), dtype=dtype)
        for number, entry in self.record.returns.get(attributes["buffer"], {}).items():
            whole[number] = entry
        return whole.reshape(shape_of_entries(shape, count))
