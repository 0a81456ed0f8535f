"""A lowered model: the ir and what the executor needs to know about its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from popsim_torch.anchors import AnchorRequest
from popsim_torch.enums import OutputMode
from popsim_torch.ir import Graph


@dataclass(frozen=True)
class LoopCounts:
    """How often a call runs the model.

    Attributes:
        device_iterations: Weight updates (training) or micro-batches (inference) per call.
        gradient_accumulation: Micro-batches per weight update; 1 for inference.
    """

    device_iterations: int
    gradient_accumulation: int


@dataclass(frozen=True)
class AnchorTarget:
    """An anchor request whose name was found.

    Attributes:
        request: The user's request, its mode resolved.
        name: The tensor's name in this graph.
    """

    request: AnchorRequest
    name: str


@dataclass(frozen=True)
class Return:
    """A tensor that comes back from a run.

    Attributes:
        shape: Of all entries together, what the user gets.
        dtype: What the user gets.
        mode: Which micro-batches come back.
        keep: Kept on the device until asked for (anchors), instead of returned by the run.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    mode: OutputMode
    keep: bool


@dataclass(frozen=True)
class AnchorView:
    """Where an anchored tensor is found after a run.

    A tensor and its views share one place: a kept return, or the tensor's own memory if nothing
    else comes there.

    Attributes:
        kept: Position in ``Program.returns``, or None.
        tensor: Without ``kept``, the id of the tensor that holds the values.
        shape: What the user gets.
        num_entries: How many micro-batches' values that is.
        entry_shape: The anchored tensor's own shape.
        entry_strides: In elements of one entry of the return, or of the tensor.
        offset: The same, from its start.
        is_whole: It is all that lies there, in the same order.
    """

    kept: int | None
    tensor: int
    shape: tuple[int, ...]
    num_entries: int
    entry_shape: tuple[int, ...]
    entry_strides: tuple[int, ...]
    offset: int
    is_whole: bool

    def of(self, entries: torch.Tensor) -> torch.Tensor:
        """Return the anchored tensor out of a copy of what ``kept`` or ``tensor`` holds."""
        if self.is_whole:
            return entries.view(self.shape)
        view = entries.as_strided(
            (self.num_entries, *self.entry_shape),
            (entries.numel() // self.num_entries, *self.entry_strides),
            self.offset,
        )
        return view.reshape(self.shape).contiguous()


@dataclass
class Program:
    """A lowered model.

    Attributes:
        graph: The ir.
        inputs: Tensor ids of the inputs, in flattened order.
        parameters: Tensor ids by parameter name, of the parameters that the program uses.
        buffers: Tensor ids by buffer name, of the floating-point buffers that it uses.
        changed_buffers: Names of the buffers that forward changes.
        states: Tensor ids of optimizer states and accumulators, by name.
        scalars: Tensor ids of hyper-parameters, by name.
        returns: What comes back: outputs, changed inputs, then anchors.
        num_outputs: How many of ``returns`` are outputs.
        changed_inputs: Positions of the inputs that forward changes, in the order of the returns
            behind the outputs.
        anchors: Where to find an anchored tensor, by the anchor's short name.
        num_stages: Number of pipeline stages.
    """

    graph: Graph
    inputs: list[int] = field(default_factory=list)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    changed_buffers: list[str] = field(default_factory=list)
    states: dict[str, int] = field(default_factory=dict)
    scalars: dict[str, int] = field(default_factory=dict)
    returns: list[Return] = field(default_factory=list)
    num_outputs: int = 0
    changed_inputs: list[int] = field(default_factory=list)
    anchors: dict[str, AnchorView] = field(default_factory=dict)
    num_stages: int = 1
