"""How full the queues of programs are, for the sinks of their records."""

import gc

import torch

import popsim_torch as poptorch
from popsim_torch.executor.queues import queue_states
from tests.unit.feeds.small_programs import passing


def states_of(*functions):
    gc.collect()  # loaders of other tests
    programs = [one for function in functions for one in function.programs]
    return queue_states(one.compiled.queues for one in programs)


def test_the_queues_of_a_loop():
    infeed, outfeed = poptorch.InfeedQueue(torch.arange(9.0)), poptorch.OutfeedQueue()
    program = passing(infeed, outfeed, 4)
    program()
    first, second = states_of(program)
    assert (first.name, first.depth) == ("InfeedQueue", 3)
    assert second.name.startswith("OutfeedQueue small_programs.py:")
    assert (second.ready, second.depth) == (4, None)
    infeed.close()


def test_queues_of_one_name_are_numbered_and_one_queue_is_named_once():
    infeeds = [poptorch.InfeedQueue(torch.arange(9.0)) for _ in range(2)]
    outfeed = poptorch.OutfeedQueue()
    programs = [passing(infeed, outfeed, 2) for infeed in infeeds]
    for program in programs:
        program()
    names = [state.name for state in states_of(*programs)]
    assert names[0] == "InfeedQueue" and names[2] == "InfeedQueue 2" and len(names) == 3
    for infeed in infeeds:
        infeed.close()


def test_queues_that_have_nothing_to_show():
    outfeed = poptorch.OutfeedQueue(poptorch.OutfeedMode.LAST)
    infeed = poptorch.InfeedQueue(torch.arange(9.0))
    program = passing(infeed, outfeed, 2)
    program()
    assert [state.name for state in states_of(program)] == ["InfeedQueue"]
    gc.collect()
    assert queue_states([None]) == []
    infeed.close()
