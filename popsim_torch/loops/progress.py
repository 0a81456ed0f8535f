"""A progress bar of a loop, drawn by a thread that looks at it now and then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from tqdm import tqdm

from popsim_torch.loops.program import LoopProgram

_SECONDS_BETWEEN_LOOKS = 0.1


@contextlib.contextmanager
def progress_bar(program: LoopProgram, trips: int, title: str) -> Iterator[None]:
    """Draw a bar of a run, for a scope.

    Args:
        program: What runs.
        trips: How many there will be (count); 0 draws nothing, and costs nothing.
        title: What stands in front of the bar.
    """
    if not trips:
        yield
        return
    first, over = program.num_trips, threading.Event()
    bar = tqdm(total=trips, desc=title, unit="trip")

    def look() -> None:
        while not over.wait(_SECONDS_BETWEEN_LOOKS):
            bar.update(program.num_trips - first - bar.n)

    thread = threading.Thread(target=look, name="popsim_torch progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        bar.update(program.num_trips - first - bar.n)
        bar.close()
