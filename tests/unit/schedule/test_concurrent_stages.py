"""Schedules whose concurrent stages have one position in the pipeline."""

import re

import pytest

from popsim_torch import _native
from popsim_torch.errors import Error

NAMES = ("sequential", "pipelined", "grouped", "interleaved")
LISTS = [[0, 1, 1, 2], [0, 0, 1], [0, 1, 1, 1], [0, 0, 1, 1, 2, 2, 2], [0, 1, 2], [0, 0]]


def expanded(word, positions):
    """Return the actions of all stages at the position that an action of a plain schedule names."""
    if word == "U":
        return ["U"]
    position, kind, micro_batch = re.split("([FB])", word)
    stages = [stage for stage, one in enumerate(positions) if one == int(position)]
    return [f"{s}{kind}{micro_batch}" for s in (stages if kind == "F" else reversed(stages))]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("positions", LISTS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_concurrent_stages_run_when_a_stage_at_their_position_would(name, positions, training):
    depth = positions[-1] + 1
    for count in (1, 3, 8, 40):
        plain = _native.schedule_times(name, depth, count, training)
        found = _native.schedule_times(name, len(positions), count, training, positions)
        assert found == [
            (times, [[one for w in words for one in expanded(w, positions)] for words in slots])
            for times, slots in plain
        ]
        assert _native.max_in_flight(
            name, len(positions), count, training, positions
        ) == _native.max_in_flight(name, depth, count, training)


@pytest.mark.parametrize("positions", [[0], [0, 1], [1, 1, 2], [0, 2, 2], [0, 1, 0], [-1, 0, 1]])
def test_positions_that_make_no_sense(positions):
    with (
        pytest.raises(Error, match="the positions of the stages must be one for each of 3 stages"),
        _native.translated_errors(),
    ):
        _native.schedule_actions("grouped", 3, 8, True, positions)


def test_positions_may_be_more_than_the_stages_that_have_ops():
    assert _native.schedule_actions("grouped", 2, 2, False, [0, 1, 1]) == "0F0 1F0 0F1 1F1"
