"""A progress bar of a loop; a thread draws it at regular intervals."""

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
    """Draw a progress bar of a run in this scope.

    Args:
        num_iterations: Returns the number of iterations begun so far, over all runs; a thread calls
            it.
        iterations: Number of iterations of the run; 0 draws nothing, and costs nothing.
        title: The text before the bar.
        unit: The name of an iteration.
        leave: Whether the bar stays visible at its end.
        figures: Returns the values after the bar, by name; a thread calls it.
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
