"""A listener of blocks that stands for a trace."""

import pytest

from popsim_torch.stages import block_listener


class Recorder:
    """A listener that writes down what it hears."""

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
    """Listen as a trace does."""
    listener = Recorder()
    token = block_listener.set(listener)
    yield listener
    block_listener.reset(token)
