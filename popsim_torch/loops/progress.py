"""A progress bar of a loop, drawn by a thread that looks at it now and then."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

from tqdm import tqdm

_SECONDS_BETWEEN_LOOKS = 0.1


@contextlib.contextmanager
def progress_bar(
    num_iterations: Callable[[], int],
    iterations: int,
    title: str,
    *,
    unit: str = "iteration",
    leave: bool = True,
    figures: Callable[[], Mapping[str, str]] | None = None,
) -> Iterator[None]:
    """Draw a bar of a run, for a scope.

    Args:
        num_iterations: Returns the iterations begun so far, over all runs (count); called by a
            thread.
        iterations: How many there will be (count); 0 draws nothing, and costs nothing.
        title: What stands in front of the bar.
        unit: What an iteration is called.
        leave: Leave the bar there at its end.
        figures: Returns what stands after the bar, by name; called by a thread.
    """
    if not iterations:
        yield
        return
    first, over = num_iterations(), threading.Event()
    bar = tqdm(total=iterations, desc=title, unit=unit, leave=leave)

    def draw() -> None:
        if figures is not None:
            bar.set_postfix(figures(), refresh=False)
        bar.update(num_iterations() - first - bar.n)

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
