"""A progress bar of a loop, drawn by a thread that looks at it now and then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from tqdm import tqdm

_SECONDS_BETWEEN_LOOKS = 0.1


@contextlib.contextmanager
def progress_bar(
    num_trips: Callable[[], int],
    trips: int,
    title: str,
    *,
    unit: str = "trip",
    leave: bool = True,
    figures: Callable[[], Mapping[str, str]] | None = None,
) -> Iterator[None]:
    """Draw a bar of a run, for a scope.

    Args:
        num_trips: Returns the trips begun so far, over all runs (count); called by a thread.
        trips: How many there will be (count); 0 draws nothing, and costs nothing.
        title: What stands in front of the bar.
        unit: What a trip is called.
        leave: Leave the bar there at its end.
        figures: Returns what stands after the bar, by name; called by a thread.
    """
    if not trips:
        yield
        return
    first, over = num_trips(), threading.Event()
    bar = tqdm(total=trips, desc=title, unit=unit, leave=leave)

    def draw() -> None:
        if figures is not None:
            bar.set_postfix(figures(), refresh=False)
        bar.update(num_trips() - first - bar.n)

    def look() -> None:
        while not over.wait(_SECONDS_BETWEEN_LOOKS):
            draw()

    thread = threading.Thread(target=look, name="popsim_torch progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        draw()
        bar.refresh()
        bar.close()
