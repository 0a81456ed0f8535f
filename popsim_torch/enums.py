"""The enumerations of the mirrored API, with the values PopTorch programs rely on.

The enumerations have no behaviour of their own except how they print. Options keep enum values as
plain integers (``options.output_mode``), which compare equal to the members of the integer enums
below.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterator
from enum import Enum, IntEnum
from itertools import pairwise

__all__ = [
    "AutoStage",
    "CommGroupType",
    "ConnectionType",
    "DataLoaderMode",
    "HalfFloatCastingBehavior",
    "Liveness",
    "MatMulSerializationMode",
    "MeanReductionStrategy",
    "MultiConvPlanType",
    "OutfeedOptimizerMode",
    "OutputMode",
    "OverlapMode",
    "PipelineSchedule",
    "ReductionType",
    "SharingStrategy",
    "SyncPattern",
    "VariableRetrievalMode",
]


def explain_members(module: str) -> None:
    """Give the members of a module's enums docstrings, which ``help`` shows.

    The docstrings are the strings below the members in the source. Without the source nothing is
    added.

    Args:
        module: The name of the module.
    """
    try:
        body = ast.parse(inspect.getsource(sys.modules[module])).body
    except (OSError, TypeError):
        return
    for node in body:
        kind = getattr(sys.modules[module], getattr(node, "name", ""), None)
        if isinstance(node, ast.ClassDef) and isinstance(kind, type) and issubclass(kind, Enum):
            for name, text in _member_texts(node):
                kind[name].__doc__ = text


def _member_texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """Yield each member of an enum with the string below it, on one line, if there is one."""
    for one, below in pairwise(node.body):
        if not isinstance(one, ast.Assign) or not isinstance(one.targets[0], ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield one.targets[0].id, " ".join(str(below.value.value).split())


class NamedIntEnum(IntEnum):
    """Integers that print as their names, such as ``OutputMode.Final``, in every Python version."""

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class OutputMode(NamedIntEnum):
    """Which of the micro-batches of one call are returned to the host."""

    Final = 0
    """Only the last micro-batch of the last device iteration."""
    EveryN = 1
    """All micro-batches of every N-th device iteration."""
    All = 2
    """Every micro-batch."""
    Sum = 3
    """The element-wise sum over all micro-batches; int32 for integers and booleans."""
    Default = 4
    """Not chosen: training models use ``Final``, inference models ``All``."""


class PipelineSchedule(NamedIntEnum):
    """When the stages of a pipeline run; it changes no values.

    A micro-batch takes one slot for the forward pass of each stage and one for the backward pass,
    ``2 n`` slots for ``n`` stages. The schedules differ in when the next micro-batch begins.
    """

    Grouped = 0
    """One slot later: all stages run forward together, then backward; ``2 n`` are in flight."""
    Interleaved = 1
    """Two slots later: a stage has one slot at a time; ``n`` micro-batches are in flight."""
    Sequential = 2
    """When the previous one is done: one is in flight, as with ``ShardedExecution``."""
    Default = 3
    """Not chosen: PopTorch's pipeline. One slot later, and the last stage runs forward and backward
    in one slot; ``2 n - 1`` are in flight."""


class DataLoaderMode(NamedIntEnum):
    """Where a ``DataLoader`` assembles its batches."""

    Sync = 0
    """In the calling process, as PyTorch's own loader."""
    Async = 1
    """In a worker process that fills a ring buffer."""
    AsyncRebatched = 2
    """As ``Async``; the batches of the workers are cut and joined to exact combined batches."""


class SharingStrategy(NamedIntEnum):
    """How a dataset reaches the worker process of an asynchronous loader."""

    SharedMemory = 0
    """A spawned process; the dataset travels through memory."""
    FileSystem = 1
    """A spawned process; the dataset travels through a temporary file."""
    Fork = 2
    """A forked process; nothing is copied."""
    ForkServer = 3
    """A process forked from a clean server process."""


class ReductionType(NamedIntEnum):
    """How the gradients of micro-batches and replicas are combined."""

    Sum = 0
    """Added up."""
    Mean = 1
    """Averaged."""
    NoReduction = 2
    """Not combined."""


class MeanReductionStrategy(NamedIntEnum):
    """When a mean over accumulated gradients is divided by their number."""

    Running = 0
    """The accumulator always holds the mean of the gradients so far."""
    Post = 1
    """Once, after the last micro-batch."""
    PostAndLoss = 2
    """By the replicas before the backward pass, by the micro-batches after it (deprecated)."""


class ConnectionType(NamedIntEnum):
    """When a model attaches to its device."""

    Always = 0
    """When the model is compiled."""
    OnDemand = 1
    """After compilation, when the model first runs."""
    Never = 2
    """Not at all: the model can only be compiled."""


class SyncPattern(NamedIntEnum):
    """Which IPUs of a machine wait for each other before they exchange data; no effect here."""

    Full = 0
    """All of them."""
    SinglePipeline = 1
    """Those of one replica."""
    ReplicaAndLadder = 2
    """Odd and even IPUs separately."""


class HalfFloatCastingBehavior(NamedIntEnum):
    """No effect: operations on float16 and float32 follow PyTorch's promotion rules."""

    FloatDowncastToHalf = 0
    """The float32 operand is narrowed."""
    HalfUpcastToFloat = 1
    """The float16 operand is widened."""
    Default = 2
    """Not chosen."""


class AutoStage(NamedIntEnum):
    """How blocks get a stage if no explicit ``Stage`` names them."""

    SameAsIpu = 0
    """The stage is the block's ``ipu_id``."""
    AutoIncrement = 1
    """Every new block opens the next stage: 1, 2, 3, ..."""


class Liveness(NamedIntEnum):
    """How long the tensors of a phase stay on the chip in phased execution; no effect here."""

    AlwaysLive = 0
    """For the whole program."""
    OffChipAfterFwd = 1
    """Until the forward phases are done."""
    OffChipAfterFwdNoOverlap = 2
    """As ``OffChipAfterFwd``, without overlap of loading and computing."""
    OffChipAfterEachPhase = 3
    """Until the phase is done."""


class OverlapMode(Enum):
    """Which loop hides the transfer of an input or output behind computation."""

    NoOverlap = "no_overlap"
    """None."""
    OverlapAccumulationLoop = "overlap_accumulation_loop"
    """The loop over the micro-batches of one weight update."""
    OverlapDeviceIterationLoop = "overlap_device_iteration_loop"
    """The loop over device iterations."""


class MatMulSerializationMode(Enum):
    """Which dimension of a matrix product is split: its parts are computed one after another."""

    InputChannels = "input_channels"
    """The rows of the left operand."""
    ReducingDim = "reducing_dim"
    """The dimension summed over."""
    OutputChannels = "output_channels"
    """The columns of the right operand."""
    Disabled = "none"
    """None: the product is computed as a whole."""


class MultiConvPlanType(NamedIntEnum):
    """How the convolutions of a ``MultiConv`` share the chip."""

    Parallel = 0
    """Side by side on different tiles."""
    Serial = 1
    """One after another on all tiles."""


class CommGroupType(NamedIntEnum):
    """How replicas are divided into groups; no effect on one replica."""

    All = 0
    """One group of all replicas."""
    Consecutive = 1
    """Groups of neighbours: replica ``r`` is in group ``r // size``."""
    Orthogonal = 2
    """Groups of replicas a fixed distance apart: replica ``r`` is in group ``r % number``."""
    NoGrouping = 3
    """Every replica is a group of its own."""


class VariableRetrievalMode(NamedIntEnum):
    """Which replicas' values of a weight are read back to the host; no effect on one replica."""

    OnePerGroup = 0
    """Those of the first replica of each group."""
    AllReplicas = 2
    """Those of every replica."""


class OutfeedOptimizerMode(Enum):
    """Which gradients an ``OutfeedOptimizer`` enqueues, and when.

    To enqueue both, use two wrappers, one around the other, each with its own queue.
    """

    AFTER_COMPUTE = "after_compute"
    """The gradients of one micro-batch, when they are computed: one element per micro-batch."""
    BEFORE_APPLY = "before_apply"
    """The gradients accumulated for an update, right before it: one element per update."""


explain_members(__name__)
