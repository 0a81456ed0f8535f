"""A listener of blocks that replaces a trace."""

import pytest

from popsim_torch.stages import block_listener


class Recorder:
    """A listener that records its calls."""

    def __init__(self):
        self.events = []

    def begin(self, user_id, ipu_id):
        self.events.append((user_id, ipu_id))

    def end(self):
        self.events.append("end")

    def begin_stage(self, stage_id):
        self.events.append(stage_id)

    def return_to_stage(self, stage_id):
        self.events.append(f"back to {stage_id}")


@pytest.fixture
def recorder():
    """Return a listener that listens as a trace does."""
    listener = Recorder()
    token = block_listener.set(listener)
    yield listener
    block_listener.reset(token)
