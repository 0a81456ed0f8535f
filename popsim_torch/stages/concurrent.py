"""A pipeline with concurrent stages. Package private: ``pipelining.pipeline`` makes it."""

from __future__ import annotations

from collections.abc import Sequence

from popsim_torch.stages.strategies import PipelinedExecution, Stage

__all__ = ["ConcurrentExecution", "flat_positions"]


def flat_positions(sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the position of each stage in the pipeline; empty if no stages are concurrent.

    Args:
        sizes: The number of stages at each position.
    """
    if all(size == 1 for size in sizes):
        return ()
    return tuple(position for position, size in enumerate(sizes) for _ in range(size))


class ConcurrentExecution(PipelinedExecution):
    """Run the stages at one position of the pipeline at the same time, on the same micro-batch.

    Args:
        ipus: The IPU of each stage.
        positions: The position of each stage, in ascending order.
    """

    def __init__(self, ipus: Sequence[int], positions: Sequence[int]) -> None:
        super().__init__(*(Stage().ipu(ipu) for ipu in ipus))
        self._positions = tuple(positions)

    def position(self, stage_id: int) -> int:
        """Return the position of a stage in the pipeline."""
        return self._positions[stage_id]

    def __repr__(self) -> str:
        groups: dict[int, list[Stage]] = {}
        for stage, position in zip(self.stages, self._positions, strict=True):
            groups.setdefault(position, []).append(stage)
        shown = (repr(group[0] if len(group) == 1 else group) for group in groups.values())
        return f"{type(self).__name__}({', '.join(shown)})"
