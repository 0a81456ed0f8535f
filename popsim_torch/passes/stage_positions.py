"""Tells which stages of a pipeline are concurrent."""

from __future__ import annotations

from collections.abc import Sequence


def stages_beside(stage: int, positions: Sequence[int]) -> set[int]:
    """Return the stages at the position of a stage, which are concurrent, and the stage itself.

    Args:
        stage: The number of a stage.
        positions: The position of each stage in the pipeline; empty if no stages are concurrent.
    """
    if not positions:
        return {stage}
    return {other for other, position in enumerate(positions) if position == positions[stage]}
