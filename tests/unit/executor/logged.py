"""The lines of the back end's log, which pytest's own capture does not see."""

import logging
from contextlib import contextmanager

from popsim_torch import logs


class _Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@contextmanager
def backend_lines():
    """Yield a list that collects the lines of the back end's log, of all levels."""
    handler, level = _Lines(), logs.backend.level
    others = list(logs.backend.handlers)
    for other in others:
        logs.backend.removeHandler(other)
    logs.backend.addHandler(handler)
    logs.backend.setLevel(logs.TRACE)
    try:
        yield handler.lines
    finally:
        logs.backend.setLevel(level)
        logs.backend.removeHandler(handler)
        for other in others:
            logs.backend.addHandler(other)
