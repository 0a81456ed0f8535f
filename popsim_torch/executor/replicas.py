"""Replicas: how they share inputs, weights and buffers, and which models can have several."""

from __future__ import annotations

from torch import nn

from popsim_torch.enums import CommGroupType
from popsim_torch.errors import Error, listed_names
from popsim_torch.ir import LoopCounts, Program, walk_all
from popsim_torch.options import Options
from popsim_torch.private_torch.modules import BatchNorm

__all__ = ["check_buffers", "check_enqueues", "groups_of", "input_groups"]


def groups_of(kind: CommGroupType, size: int, replicas: int) -> tuple[int, ...]:
    """Return the group of each replica.

    Groups are numbered from 0, in the order of their first replicas.

    Args:
        kind: How replicas are grouped.
        size: Number of replicas per group, a divisor of ``replicas``; it matters for
            ``Consecutive`` and ``Orthogonal`` only.
        replicas: Number of replicas.
    """
    match kind:
        case CommGroupType.All:
            return (0,) * replicas
        case CommGroupType.NoGrouping:
            return tuple(range(replicas))
        case CommGroupType.Consecutive:
            return tuple(replica // size for replica in range(replicas))
        case CommGroupType.Orthogonal:
            return tuple(replica % (replicas // size) for replica in range(replicas))


def input_groups(options: Options) -> tuple[int, ...]:
    """Return the input group of each replica; empty if each replica has its own inputs.

    Raises:
        Error: The number of replicas is out of range, or groups do not divide it.
    """
    replicas, size = options.replication_factor, options.input_group_size
    if replicas < 1:
        raise Error(f"Options.replicationFactor({replicas}): the count must be 1 or more.")
    if size < 1 or replicas % size:
        raise Error(
            f"Options.inputReplicaGrouping({size}): the size must divide the replication factor, "
            f"{replicas}. Call it after Options.replicationFactor."
        )
    if size == 1:
        return ()
    return groups_of(CommGroupType(options.input_cgt), size, replicas)


def check_buffers(module: nn.Module, program: Program, options: Options) -> None:
    """Refuse models that change a buffer, of which each replica would have another value.

    Running statistics of batch norm are exempt: each replica keeps its own, and the host gets those
    of the first one.

    Args:
        module: The module.
        program: Its program.
        options: Its options.

    Raises:
        Error: Forward changes such a buffer, and the options do not allow that.
    """
    replicas = options.replication_factor
    if not options.broadcast_buffers or replicas == options.input_group_size:
        return
    statistics = {
        f"{path}.{name}" if path else name
        for path, child in module.named_modules()
        if isinstance(child, BatchNorm)
        for name, _ in child.named_buffers(recurse=False)
    }
    changed = [name for name in program.changed_state if name not in statistics]
    if changed:
        raise Error(
            f"Forward changes {listed_names(changed)} in place, with "
            f"Options.replicationFactor({replicas}): each replica would have another value, and "
            "broadcasting buffers that change is not supported. Call "
            "poptorch.Options.broadcastBuffers(False) to let each replica keep its own; the host "
            "then gets that of the first replica."
        )


def check_enqueues(program: Program, loop: LoopCounts) -> None:
    """Refuse elements of queues that a loop or branch makes, if there are several replicas.

    An element has the values of all replicas, and each may make another number of them.

    Raises:
        Error: A loop or branch enqueues.
    """
    if loop.replicas == 1:
        return
    for graph, op in walk_all(program.graph):
        if op.kind == "enqueue" and graph is not program.graph:
            raise Error(
                f"{op.name or 'OutfeedQueue.enqueue'} is in a loop or branch of a model with "
                f"Options.replicationFactor({loop.replicas}): each replica could enqueue another "
                "number of elements. Return the value from the loop, and enqueue it after."
            )
