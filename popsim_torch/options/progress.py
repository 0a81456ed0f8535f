"""The progress bar shown while a model is compiled. Package private."""

from __future__ import annotations

import sys
from typing import TextIO

from tqdm import tqdm


class CompilationProgressBar:
    """A bar titled "Graph compilation"; call it with the finished and the total steps.

    Args:
        stream: Where to draw; the standard error stream if None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._bar: tqdm | None = None

    def __call__(self, progress: int, total: int) -> None:
        """Draw the bar, and close it when all steps are done.

        Args:
            progress: The number of finished steps.
            total: The total number of steps.
        """
        if self._bar is None:
            self._bar = tqdm(
                total=total, desc="Graph compilation", file=self._stream or sys.stderr, leave=True
            )
        self._bar.total = total
        self._bar.update(progress - self._bar.n)
        if progress >= total:
            self._bar.close()
            self._bar = None
