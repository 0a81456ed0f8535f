"""Additional tensors of a program with stages: copies between IPUs, stashes, counters.

In the program, an op on any stage simply reads a value, and the memory plan keeps one for each
micro-batch in flight. This pass gives such values the names they have on a machine with several
IPUs. Only anchored ones become tensors, computed by copy ops; the readers do not change.

* ``<t>_c<ipu>``: the copy of ``t`` that an op on another IPU reads.
* ``Stashed___<t>`` and ``Restored___<t>``: the ``t`` that a stage of a training pipeline keeps for
  its backward pass, as forward stores it and as backward reads it, for each micro-batch.
* ``Counter____VGraph<ipu>``: the number of micro-batches in the running means of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from popsim_torch.ir import Graph, Op, Phase, Program, Role, Tensor, TensorKind, Uses, names, walk
from popsim_torch.passes.stage_positions import stages_beside


def add_stage_tensors(
    program: Program,
    ipu_of_stage: Mapping[int, int],
    *,
    pipelined: bool,
    last_stage_turns: bool,
    positions: Sequence[int] = (),
) -> None:
    """Offer the tensors of a program that cross its stages.

    Args:
        program: A program with recomputation, and without returns.
        ipu_of_stage: The IPU of each stage.
        pipelined: Whether several micro-batches are in flight at a time.
        last_stage_turns: Whether the backward pass of the last stage directly follows its forward
            pass.
        positions: The position of each stage in the pipeline; empty if no stages are concurrent.
    """
    tensors = _StageTensors(program, ipu_of_stage)
    num_stages = 1 + max((op.stage for _, op in walk(program.graph)), default=0)
    if num_stages > 1:
        tensors.add_copies()
        if pipelined:
            last = stages_beside(num_stages - 1, positions)
            tensors.add_stashes(last if last_stage_turns else ())
    tensors.add_counters(pipelined)
    tensors.finish()


class _StageTensors:
    def __init__(self, program: Program, ipu_of_stage: Mapping[int, int]) -> None:
        self._program = program
        self._graph: Graph = program.graph
        self._ipu_of_stage = ipu_of_stage
        self._offers = program.offers
        self._uses = Uses(self._graph)
        # Ops to insert, by the op that they are inserted before.
        self._before: dict[int, list[Op]] = {}
        # The names of tensors, by id.
        self._name_of = {tensor_id: name for name, tensor_id in self._graph.names.items()}

    def add_copies(self) -> None:
        """Add ``<t>_c<ipu>`` for inputs that another IPU computed in the same phase."""
        for _, reader in walk(self._graph):
            if reader.phase == Phase.UPDATE:
                continue
            for name, tensor, writer in self._named_values(reader):
                ipu = self._ipu(reader.stage)
                if writer.phase == reader.phase and self._ipu(writer.stage) != ipu:
                    self._offer_copy(names.copied_to(name, ipu), tensor, reader)

    def add_stashes(self, keep_nothing: Container[int]) -> None:
        """Add the tensors that stages keep for their backward pass.

        Args:
            keep_nothing: Stages whose backward pass directly follows their forward pass.
        """
        for _, reader in walk(self._graph):
            if reader.phase != Phase.BACKWARD:
                continue
            for name, tensor, writer in self._named_values(reader):
                if writer.phase == Phase.FORWARD and writer.stage not in keep_nothing:
                    self._offer(names.stashed(name), partial(_itself, tensor))
                    self._offer_copy(names.restored(name), tensor, reader)

    def add_counters(self, pipelined: bool) -> None:
        """Add the count of micro-batches in the running means of each stage."""
        found: dict[str, Op] = {}
        for _, op in walk(self._graph):
            if op.kind == "accumulate" and op.attributes["running"]:
                stage = op.stage if pipelined else None
                found.setdefault(names.counter(self._ipu(op.stage), stage), op)
        for name, op in found.items():
            self._offer(name, partial(self._count, name, op))

    def finish(self) -> None:
        """Put the collected ops into their places."""
        ops: list[Op] = []
        for _, op in walk(self._graph):
            ops += [*self._before.get(id(op), ()), op]
        self._graph.ops = ops

    def _ipu(self, stage: int) -> int:
        return self._ipu_of_stage.get(stage, stage)

    def _named_values(self, reader: Op) -> list[tuple[str, Tensor, Op]]:
        """Return an op's inputs that ops write in every micro-batch, with name and writer."""
        found = []
        for tensor_id in dict.fromkeys(reader.inputs):
            name = self._name_of.get(tensor_id)
            if name is None:
                continue
            tensor = self._graph.tensors[tensor_id]
            writers = self._uses.writers(tensor_id)
            if self._graph.root(tensor).kind == TensorKind.VALUE and writers:
                found.append((name, tensor, writers[-1]))
        return found

    def _offer(self, name: str, make: Callable[[], Tensor]) -> None:
        """Offer a tensor, if no tensor has its name."""
        if name not in self._graph.names and name not in self._offers.names:
            self._offers.add(self._graph, name, make)

    def _offer_copy(self, name: str, tensor: Tensor, reader: Op) -> None:
        self._offer(name, partial(self._copy, name, tensor, reader))

    def _copy(self, name: str, tensor: Tensor, reader: Op) -> Tensor:
        """Add a copy of a tensor before an op that reads it."""
        copy = self._graph.add_tensor(TensorKind.VALUE, tensor.dtype, tensor.shape, name=name)
        op = replace(reader, kind="copy", inputs=[tensor.id], outputs=[copy.id], attributes={})
        op.name = name
        self._before.setdefault(id(reader), []).append(op)
        return copy

    def _count(self, name: str, accumulation: Op) -> Tensor:
        """Add a counter that increases where gradients are accumulated."""
        graph = self._graph
        one = graph.add_tensor(
            TensorKind.CONSTANT, torch.float32, (), value=torch.ones((), device="cpu")
        )
        count = graph.add_tensor(
            TensorKind.VARIABLE, torch.float32, (), name=name, role=Role.ACCUMULATOR
        )
        self._program.states[name] = count.id
        whole = graph.add_view(count, (), (), 0)
        op = replace(
            accumulation,
            inputs=[one.id, count.id],
            outputs=[whole.id],
            attributes={"running": False},
        )
        op.name = name
        self._before.setdefault(id(accumulation), []).append(op)
        return count


def _itself(tensor: Tensor) -> Tensor:
    return tensor
