"""A whole program: its graph, and the role of its tensors for the executor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from popsim_torch.enums import PipelineSchedule
from popsim_torch.ir.graph import Graph, Op, Phase
from popsim_torch.ir.offers import Offers
from popsim_torch.tables import Described


@dataclass(frozen=True)
class LoopCounts:
    """How often a call runs the model.

    Attributes:
        device_iterations: Weight updates (training) or micro-batches (inference) per call.
        gradient_accumulation: Micro-batches per weight update; 1 for inference.
        replicas: Copies of the model (count), each with micro-batches of its own.
        input_groups: The input group of each replica, numbered from 0 in the order of their first
            replicas; empty if each replica has its own inputs.
    """

    device_iterations: int
    gradient_accumulation: int
    replicas: int = 1
    input_groups: tuple[int, ...] = ()

    @property
    def num_inputs(self) -> int:
        """The number of inputs that a micro-batch has, one for each group of replicas."""
        return max(self.input_groups) + 1 if self.input_groups else self.replicas


def is_pipelined(schedule: PipelineSchedule) -> bool:
    """Return whether several micro-batches are in flight at a time."""
    return schedule != PipelineSchedule.Sequential


@dataclass(frozen=True)
class RunSettings:
    """The settings of a program's runs.

    Attributes:
        loop: How often a call runs the model.
        schedule: The order in which micro-batches run; ``Default`` is PopTorch's pipeline.
        num_ipus: Number of IPUs that it takes; 0 if it has no work for an IPU.
        floating_point_checks: Whether a run ends at the first op whose arithmetic fails.
        reads_inputs: Whether it reads the host's inputs; otherwise the device makes them.
        positions: The position of each stage in the pipeline: concurrent stages have the same one.
            Empty if no stages are concurrent.
        ipu_of_stage: The IPU of each stage; a stage that is not here is on the IPU of its number.
        process: The number of this process among those that run the program together.
        num_processes: The number of these processes.
    """

    loop: LoopCounts
    schedule: PipelineSchedule
    num_ipus: int
    floating_point_checks: bool
    reads_inputs: bool
    positions: tuple[int, ...] = ()
    ipu_of_stage: dict[int, int] = field(default_factory=dict)
    process: int = 0
    num_processes: int = 1


@dataclass(frozen=True)
class Anchor:
    """The place of an anchored tensor after a run.

    Attributes:
        tensor: The id of the tensor.
        kept: Index in ``Program.returns``, of the tensor itself or of its base; None if the
            tensor's own memory keeps the value, because no other value is written there.
        shape: The shape that the user gets.
        period: The period of ``EveryN`` in device iterations, counted over all runs; 0 if every run
            has values.
    """

    tensor: int
    kept: int | None
    shape: tuple[int, ...]
    period: int


_PHASES = tuple(phase.name.lower() for phase in Phase)


@dataclass
class Program(Described):
    """A lowered model.

    Attributes:
        graph: The ops and tensors.
        parameters: Tensor ids by parameter name, of the parameters that the program uses.
        buffers: Tensor ids by buffer name, of the floating-point buffers that it uses.
        changed_state: Names of the parameters and buffers that forward changes.
        states: Tensor ids of optimizer states and accumulators, by name.
        scalars: Tensor ids of hyper-parameters, by name.
        outputs: Tensor ids of forward's results.
        losses: Tensor ids of what the body of a loop calls ``backward()`` of, if it is computed.
        changed_inputs: Tensor id of the new value of each input that forward changes, by the
            input's index.
        sources: Name of the node of the trace from which a tensor's op was lowered, by tensor id.
            Prints and anchors do not change these names.
        checkpoints: Ids of tensors (not of views) that are kept for the backward pass.
        anchors: The place of each anchored tensor, by the anchor's short name. The tensors of an
            anchor with a pattern are here by the names that ``anchor_of_group`` gives.
        groups: The tensors that the pattern of an anchor means: their names, by the anchor's short
            name.
        offers: Names of the tensors that the program computes only if they are anchored.
    """

    graph: Graph = field(default_factory=Graph)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    changed_state: list[str] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, int] = field(default_factory=dict)
    outputs: list[int] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    changed_inputs: dict[int, int] = field(default_factory=dict)
    sources: dict[int, str] = field(default_factory=dict)
    checkpoints: set[int] = field(default_factory=set)
    anchors: dict[str, Anchor] = field(default_factory=dict)
    groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    offers: Offers = field(default_factory=Offers)

    def __repr__(self) -> str:
        figures = self._figures()
        phases = ", ".join(f"{figures[name]} {name}" for name in _PHASES if figures[name])
        return (
            f"Program({figures['ops']} ops: {phases or 'none'}; {figures['names']} tensor names, "
            f"{figures['parameters']} parameters)"
        )

    def _figures(self) -> dict[str, object]:
        phases = Counter(op.phase.name.lower() for op in self.graph.ops)
        return {
            "ops": len(self.graph.ops),
            **{name: phases[name] for name in _PHASES},
            "tensors": len(self.graph.tensors),
            "names": len(self.tensor_names()),
            "parameters": len(self.parameters),
            "outputs": len(self.outputs),
            "anchors": ", ".join(self.anchors),
        }

    @property
    def returns(self) -> list[Op]:
        """The ops that return a tensor from a run: outputs, changed inputs, then anchors."""
        found: dict[Any, Op] = {
            op.attributes["buffer"]: op for op in self.graph.ops if op.kind == "anchor"
        }
        return [found[position] for position in sorted(found)]

    def tensor_names(self) -> list[str]:
        """Return the name of every tensor that can be anchored, each once.

        Anchors change neither the names nor their order.
        """
        offered = self.offers.names
        return [name for name in self.graph.names if name not in offered] + [*offered]

    def copy(self) -> Program:
        """Return a program whose graph can be changed independently of this one's."""
        return replace(self, graph=self.graph.copy())
