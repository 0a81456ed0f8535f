"""Tensors that a program cut into stages has besides: copies between IPUs, stashes, counters.

In the program a value simply is where it is read, on whatever stage, and the memory plan keeps one
for each micro-batch in flight. Here such values get the names they have on a machine of several
IPUs. Only those that are anchored become tensors, by ops that copy; the readers stay as they are.

* ``<t>_c<ipu>``: what an op on another IPU reads of ``t``.
* ``Stashed___<t>`` and ``Restored___<t>``: what a stage of a training pipeline keeps of ``t`` for
  its backward pass, as forward puts it away and as backward gets it, micro-batch by micro-batch.
* ``Counter____VGraph<ipu>``: the micro-batches that running means of gradients contain.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch

from popsim_torch.ir import Graph, Op, Phase, Program, Role, Tensor, TensorKind, Uses, names, walk


def add_stage_tensors(program: Program, ipu_of_stage: Mapping[int, int], pipelined: bool) -> None:
    """Offer what a program has at the borders of its stages.

    Args:
        program: With what backward rebuilds, and without returns.
        ipu_of_stage: The IPU of each stage.
        pipelined: Several micro-batches are in flight at a time.
    """
    tensors = _StageTensors(program, ipu_of_stage)
    num_stages = 1 + max((op.stage for _, op in walk(program.graph)), default=0)
    if num_stages > 1:
        tensors.add_copies()
        if pipelined:
            tensors.add_stashes(num_stages - 1)
    tensors.add_counters(pipelined)
    tensors.finish()


class _StageTensors:
    def __init__(self, program: Program, ipu_of_stage: Mapping[int, int]) -> None:
        self._program = program
        self._graph: Graph = program.graph
        self._ipu_of_stage = ipu_of_stage
        self._offers = program.offers
        self._uses = Uses(self._graph)
        # Ops to put in, by the op that they go before.
        self._before: dict[int, list[Op]] = {}
        # The names of tensors, for those that are asked for by id.
        self._name_of = {tensor_id: name for name, tensor_id in self._graph.names.items()}

    def add_copies(self) -> None:
        """Add ``<t>_c<ipu>`` for what an op reads that another IPU computed in the same phase."""
        for _, reader in walk(self._graph):
            if reader.phase == Phase.UPDATE:
                continue
            for name, tensor, writer in self._named_values(reader):
                ipu = self._ipu(reader.stage)
                if writer.phase == reader.phase and self._ipu(writer.stage) != ipu:
                    self._offer_copy(names.copied_to(name, ipu), tensor, reader)

    def add_stashes(self, last_stage: int) -> None:
        """Add what stages keep for their backward pass.

        Args:
            last_stage: Its backward pass follows its forward at once: it keeps nothing.
        """
        for _, reader in walk(self._graph):
            if reader.phase != Phase.BACKWARD:
                continue
            for name, tensor, writer in self._named_values(reader):
                if writer.phase == Phase.FORWARD and writer.stage < last_stage:
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
        """Return what an op reads of what ops write in every micro-batch, with name and writer."""
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
        """Offer a tensor whose name is none yet."""
        if name not in self._graph.names and name not in self._offers.names:
            self._offers.add(self._graph, name, make)

    def _offer_copy(self, name: str, tensor: Tensor, reader: Op) -> None:
        self._offer(name, partial(self._copy, name, tensor, reader))

    def _copy(self, name: str, tensor: Tensor, reader: Op) -> Tensor:
        """Add a copy of a tensor in front of an op that reads it."""
        copy = self._graph.add_tensor(TensorKind.VALUE, tensor.dtype, tensor.shape, name=name)
        op = replace(reader, kind="copy", inputs=[tensor.id], outputs=[copy.id], attributes={})
        op.name = name
        self._before.setdefault(id(reader), []).append(op)
        return copy

    def _count(self, name: str, accumulation: Op) -> Tensor:
        """Add ones up where gradients are added up."""
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
