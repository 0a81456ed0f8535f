"""What the back end says in its log, whose lines do not reach pytest's own capture."""

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
    """Collect the lines of the back end's log, of all levels, in the list that this yields."""
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
