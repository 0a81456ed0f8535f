"""Blocks, and the stage and the IPU each of them is assigned."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from popsim_torch.enums import AutoStage
from popsim_torch.errors import (
    Error,
    UsageAssertionError,
    UsageTypeError,
    UsageValueError,
)
from popsim_torch.stages import (
    BeginBlock,
    Block,
    BlockFunction,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
    StageAssigner,
    block_listener,
    module_repr,
    removeBlocks,
)


class Recorder:
    """A listener that records its calls."""

    def __init__(self):
        self.events = []

    def begin(self, user_id, ipu_id):
        self.events.append((user_id, ipu_id))

    def end(self):
        self.events.append("end")


@pytest.fixture
def recorder():
    listener = Recorder()
    token = block_listener.set(listener)
    yield listener
    block_listener.reset(token)


# Blocks


def test_blocks_do_nothing_outside_a_trace():
    with Block("a", ipu_id=1):
        Block.start()
        Block.useAutoId()
    layer = BeginBlock(nn.Linear(2, 2), ipu_id=3)
    assert layer(torch.ones(1, 2)).shape == (1, 2)


def test_block_reports_its_begin_and_its_end(recorder):
    with Block("a", ipu_id=1):
        pass
    assert recorder.events == [("a", 1), "end"]


def test_block_ends_when_its_body_raises(recorder):
    with pytest.raises(KeyError), Block("a"):
        raise KeyError
    assert recorder.events == [("a", None), "end"]


def test_start_reports_a_begin_only(recorder):
    Block.start("a", 2)
    assert recorder.events == [("a", 2)]


def test_int_is_accepted_as_a_block_id(recorder):
    Block.start(7)
    assert recorder.events == [("7", None)]


@pytest.mark.parametrize("falsy", [None, "", 0])
def test_falsy_id_gets_an_automatic_one(recorder, falsy):
    Block.start("named")
    Block.start(falsy)
    Block.start(falsy)
    assert recorder.events == [("named", None), ("0", None), ("1", None)]


def test_automatic_ids_restart_on_request(recorder):
    Block.start()
    Block.useAutoId()
    Block.start()
    assert recorder.events == [("0", None), ("0", None)]


def test_automatic_ids_restart_in_every_trace(recorder):
    Block.start()
    second = Recorder()
    block_listener.set(second)
    Block.start()
    assert second.events == [("0", None)]


@pytest.mark.parametrize("make", [Block, Block.start, BlockFunction])
def test_block_id_must_be_text_or_int(make):
    with pytest.raises(UsageTypeError, match=r"user_id=1\.5 is a float"):
        make(1.5)


def test_ipu_id_must_be_an_int():
    with pytest.raises(UsageTypeError, match="ipu_id='0' is a str"):
        Block("a", ipu_id="0")


def test_ipu_id_must_not_be_negative():
    with pytest.raises(UsageValueError, match="ipu_id=-1 is negative"):
        Block("a", ipu_id=-1)


def test_block_function_runs_its_body_in_a_block(recorder):
    @BlockFunction("f", ipu_id=1)
    def double(x):
        recorder.events.append("body")
        return 2 * x

    assert double(4) == 8
    assert recorder.events == [("f", 1), "body", "end"]


def test_block_function_keeps_the_name_of_the_function():
    @BlockFunction()
    def double(x):
        return 2 * x

    assert double.__name__ == "double"


def test_block_function_draws_an_automatic_id_at_every_call(recorder):
    function = BlockFunction()(lambda: None)
    function()
    function()
    assert recorder.events == [("0", None), "end", ("1", None), "end"]


# BeginBlock


def test_begin_block_returns_the_same_module_with_the_same_parameters():
    layer = nn.Linear(2, 2)
    names = list(layer.state_dict())
    assert BeginBlock(layer, "a") is layer
    assert type(layer) is nn.Linear
    assert list(layer.state_dict()) == names


def test_marked_module_begins_its_block_and_does_not_end_it(recorder):
    BeginBlock(nn.ReLU(), "a", 1)(torch.ones(1))
    assert recorder.events == [("a", 1)]


def test_marked_module_keeps_its_automatic_id(recorder):
    layer = BeginBlock(nn.ReLU())
    layer(torch.ones(1))
    Block.start()
    layer(torch.ones(1))
    assert recorder.events == [("0", None), ("1", None), ("0", None)]


def test_ids_of_modules_are_not_given_out_again_in_a_later_trace(recorder):
    layer = BeginBlock(nn.ReLU())

    def trace():
        listener = Recorder()
        block_listener.set(listener)
        Block.start()
        layer(torch.ones(1))
        Block.start()
        return listener.events

    assert trace() == trace() == [("0", None), ("1", None), ("2", None)]


def test_module_is_marked_only_once():
    layer = BeginBlock(nn.ReLU(), "a")
    with pytest.raises(Error, match="already been assigned to a block"):
        BeginBlock(layer, "b")


def test_begin_block_wraps_a_plain_callable(recorder):
    function = BeginBlock(torch.neg, "a", 1)
    assert function(torch.tensor(2.0)) == -2.0
    assert recorder.events == [("a", 1)]


def test_a_wrapped_callable_is_a_module_that_can_be_pickled(recorder):
    module = BeginBlock(torch.neg, "a", 1)
    assert isinstance(module, nn.Module)
    assert pickle.loads(pickle.dumps(module))(torch.tensor(2.0)) == -2.0
    assert recorder.events == [("a", 1)]
    removeBlocks(module)
    assert module(torch.tensor(3.0)) == -3.0
    assert recorder.events == [("a", 1)]


def test_begin_block_refuses_what_cannot_be_called():
    with pytest.raises(Error, match=r"got a int\. Pass a torch\.nn\.Module or a callable"):
        BeginBlock(3)


@pytest.mark.parametrize(
    "twin_of", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_mark_survives_copies(recorder, twin_of):
    layer = BeginBlock(nn.ReLU(), "a", 1)
    twin_of(layer)(torch.ones(1))
    assert recorder.events == [("a", 1)]


def test_mark_survives_saving(recorder):
    file = io.BytesIO()
    torch.save(BeginBlock(nn.ReLU(), "a", 1), file)
    file.seek(0)
    torch.load(file, weights_only=False)(torch.ones(1))
    assert recorder.events == [("a", 1)]


def test_remove_blocks_reaches_all_modules_inside(recorder):
    model = BeginBlock(nn.Sequential(BeginBlock(nn.ReLU(), "a"), nn.ReLU()), "b")
    removeBlocks(model)
    model(torch.ones(1))
    assert recorder.events == []


def test_remove_blocks_leaves_other_hooks_alone():
    layer = nn.ReLU()
    calls = []
    layer.register_forward_pre_hook(lambda *_: calls.append("mine"))
    removeBlocks(BeginBlock(layer, "a"))
    layer(torch.ones(1))
    assert calls == ["mine"]


def test_module_can_be_marked_again_after_removal(recorder):
    layer = BeginBlock(nn.ReLU(), "a")
    removeBlocks(layer)
    BeginBlock(layer, "b")(torch.ones(1))
    assert recorder.events == [("b", None)]


def test_remove_blocks_needs_a_module():
    with pytest.raises(UsageAssertionError, match="got a str"):
        removeBlocks("layer")


def test_module_repr_shows_marks_before_names():
    model = nn.Sequential(nn.Linear(2, 3), BeginBlock(nn.ReLU(), "a", 1))
    assert module_repr(model) == (
        "Sequential(\n"
        "  (0): Linear(in_features=2, out_features=3, bias=True)\n"
        "  (1): BeginBlock(user_id=a, ipu_id=1) ReLU()\n"
        ")"
    )


def test_module_repr_of_an_unmarked_model_is_the_plain_one():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Dropout()), nn.Sequential())
    assert module_repr(model) == repr(model)


def test_plain_repr_does_not_show_marks():
    assert repr(BeginBlock(nn.ReLU(), "a")) == "ReLU()"


# StageAssigner


def place(assigner):
    return assigner.current_stage(), assigner.current_ipu()


def places(strategy, *blocks):
    """Return the stage and the IPU of each block, entered one after another."""
    assigner = StageAssigner(strategy)
    result = []
    for block in blocks:
        assigner.begin(*block)
        result.append(place(assigner))
    return result


def test_before_the_first_block_ops_are_on_ipu_0():
    assert place(StageAssigner(PipelinedExecution())) == (0, 0)


def test_before_the_first_block_ops_are_on_ipu_0_with_explicit_stages():
    assert place(StageAssigner(PipelinedExecution(Stage("a").ipu(3)))) == (0, 0)


def test_after_a_block_no_block_is_active():
    assigner = StageAssigner(PipelinedExecution())
    assigner.begin("a", 0)
    assigner.end()
    with pytest.raises(Error, match="No active Block, all the ops must belong to a Block"):
        assigner.current_stage()
    with pytest.raises(Error, match="No active Block"):
        assigner.current_ipu()


def test_end_of_an_inner_block_does_not_restore_the_outer():
    assigner = StageAssigner(PipelinedExecution())
    token = block_listener.set(assigner)
    with Block("outer", ipu_id=0):
        with Block("inner", ipu_id=1):
            assert place(assigner) == (1, 1)
        with pytest.raises(Error, match="No active Block"):
            assigner.current_stage()
    block_listener.reset(token)


def test_same_as_ipu_makes_the_ipu_the_stage():
    strategy = PipelinedExecution(AutoStage.SameAsIpu)
    assert places(strategy, ("a", 0), ("b", 2)) == [(0, 0), (2, 2)]


def test_same_as_ipu_needs_an_ipu():
    with pytest.raises(UsageAssertionError, match=r"Block 'a' has no ipu_id, and .*SameAsIpu"):
        places(PipelinedExecution(), ("a", None))


def test_same_as_ipu_remembers_a_block():
    assert places(PipelinedExecution(), ("a", 1), ("b", 0), ("a", None))[2] == (1, 1)


def test_auto_increment_counts_new_blocks_from_1():
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    blocks = ("a", None), ("b", None), ("a", None), ("c", None)
    assert places(strategy, *blocks) == [(1, 1), (2, 2), (1, 1), (3, 3)]


def test_auto_increment_uses_the_ipu_of_the_block():
    strategy = PipelinedExecution(AutoStage.AutoIncrement)
    assert places(strategy, ("a", 0), ("b", 0), ("a", 0)) == [(1, 0), (2, 0), (1, 0)]


def test_explicit_stage_decides_stage_and_ipu():
    strategy = PipelinedExecution("a", Stage("b").ipu(5))
    assert places(strategy, ("a", None), ("b", 3)) == [(0, 0), (1, 5)]


def test_explicit_stage_without_an_ipu_uses_that_of_the_block():
    assert places(PipelinedExecution("a", "b"), ("b", 4)) == [(1, 4)]


def test_explicit_stages_must_list_every_block():
    with pytest.raises(UsageAssertionError, match="Unknown Block 'c'"):
        places(PipelinedExecution("a", "b"), ("c", 0))


def test_block_cannot_change_its_ipu():
    with pytest.raises(Error, match=r"Block 'a': asked to run on IPU 1, but it was on IPU 0"):
        places(PipelinedExecution(), ("a", 0), ("a", 1))


def test_explicit_ipu_of_the_stage_outranks_changing_blocks():
    assert places(PipelinedExecution(Stage("a").ipu(2)), ("a", 0), ("a", 1)) == [(0, 2), (0, 2)]


def test_stages_that_run_one_after_another_can_be_come_back_to():
    blocks = ("a", 0), ("b", 2), ("a", 0), ("c", 1)
    assert places(ShardedExecution(), *blocks) == [(0, 0), (2, 2), (2, 0), (2, 1)]


def test_stages_of_phases_are_counted_through():
    strategy = SerialPhasedExecution(Phase("a").ipus(3), [Stage("b").ipu(0), Stage("c")], "d")
    blocks = ("a", None), ("b", 5), ("c", 1), ("d", 3)
    assert places(strategy, *blocks) == [(0, 3), (1, 0), (2, 1), (3, 3)]


def test_block_of_a_phase_needs_an_ipu():
    with pytest.raises(UsageAssertionError, match="Block 'a' has no IPU"):
        places(SerialPhasedExecution("a"), ("a", None))


def test_phases_must_list_every_block():
    with pytest.raises(UsageAssertionError, match="Unknown Block 'b'"):
        places(SerialPhasedExecution("a"), ("b", 0))


def test_parallel_phases_take_turns_on_even_and_odd_ipus():
    strategy = ParallelPhasedExecution("a", "b", "c")
    assert places(strategy, ("a", 0), ("b", 3), ("c", 2))[-1] == (2, 2)
    with pytest.raises(Error, match=r"Block 'b' of phase 1 is on IPU 2.* an odd one"):
        places(strategy, ("a", 0), ("b", 2))
    with pytest.raises(Error, match=r"Block 'a' of phase 0 is on IPU 1.* an even one"):
        places(strategy, ("a", 1))


def test_assigner_gives_automatic_ids():
    strategy = PipelinedExecution("1", "0")
    assert places(strategy, (None, None), (None, None)) == [(1, 1), (0, 0)]


def test_assigner_remembers_the_order_of_ipus():
    assigner = StageAssigner(PipelinedExecution())
    for block, ipu in (("a", 0), ("b", 2), ("a", None)):
        assigner.begin(block, ipu)
    assert assigner.ipu_ids == (0, 2, 0)


def test_assigner_needs_a_strategy():
    with pytest.raises(UsageTypeError, match="got a NoneType"):
        StageAssigner(None)
