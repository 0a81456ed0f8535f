"""``PipelineStage``: around calls, around construction, as a decorator."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import Error, UsageTypeError, UsageValueError
from popsim_torch.stages import PipelineStage, StageAssigner, block_listener
from popsim_torch.stages.pipeline_stage import stage_mark
from tests.options import make_options

X = torch.ones(1, 2)


def linear():
    return nn.Linear(2, 2)


@pytest.fixture(autouse=True)
def module_class_is_as_before():
    before = nn.Module.__init__
    yield
    assert nn.Module.__init__ is before


# Around calls


def test_it_does_nothing_outside_a_trace():
    with PipelineStage(1) as stage:
        assert stage.stage == 1
    assert linear()(X).shape == (1, 2)


def test_it_tells_its_number(recorder):
    with PipelineStage(0):
        pass
    with PipelineStage(1):
        pass
    assert recorder.events == [0, 1]


def test_the_stage_around_goes_on_behind_an_inner_one(recorder):
    with PipelineStage(0), PipelineStage(1), PipelineStage(2):
        pass
    assert recorder.events == [0, 1, 2, "back to 1", "back to 0"]


def test_it_ends_when_its_body_raises(recorder):
    with PipelineStage(0), pytest.raises(KeyError), PipelineStage(1):
        raise KeyError
    assert recorder.events == [0, 1, "back to 0"]


def test_one_object_can_be_entered_again_inside_of_itself(recorder):
    stage = PipelineStage(0)
    with stage, stage:
        pass
    assert recorder.events == [0, 0, "back to 0"]


def test_a_decorated_function_runs_in_the_stage(recorder):
    @PipelineStage(1)
    def double(x, *, times=2):
        """Doc."""
        return x * times

    assert double(3) == 6 and double(3, times=3) == 9
    assert double.__name__ == "double" and double.__doc__ == "Doc."
    assert recorder.events == [1, 1]


# Around construction


def built_in(stage, build=linear):
    """Return a layer that was made in a stage, outside a trace."""
    token = block_listener.set(None)
    try:
        with PipelineStage(stage):
            return build()
    finally:
        block_listener.reset(token)


def test_a_layer_keeps_the_stage_it_is_built_in(recorder):
    layer = built_in(3)
    layer(X)
    assert recorder.events == [3]


def test_layers_inside_of_layers_keep_it_too():
    model = built_in(1, lambda: nn.Sequential(linear(), nn.ReLU(), nn.Sequential(nn.Tanh())))
    assert {stage_mark(layer).stage for layer in model.modules()} == {1}


def test_the_innermost_stage_counts():
    with PipelineStage(0):
        first = nn.ReLU()
        with PipelineStage(1):
            second = nn.ReLU()
        third = nn.ReLU()
    assert [stage_mark(layer).stage for layer in (first, second, third)] == [0, 1, 0]


def test_layers_built_elsewhere_have_no_stage():
    before = linear()
    with PipelineStage(0):
        holder = nn.Sequential(before)
    assert stage_mark(before) is None and stage_mark(linear()) is None
    assert stage_mark(holder).stage == 0


def test_other_threads_build_theirs_without():
    built = []
    with PipelineStage(0):
        thread = threading.Thread(target=lambda: built.append(nn.ReLU()))
        thread.start()
        thread.join()
    assert stage_mark(built[0]) is None


def test_a_stage_that_is_open_counts_more(recorder):
    layer = built_in(1)
    with PipelineStage(0):
        layer(X)
    assert recorder.events == [0]


def test_copies_keep_the_stage(recorder):
    layer = built_in(1)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        twin(X)
    assert recorder.events == [1, 1]


def test_a_module_that_fails_to_build_leaves_nothing():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            raise KeyError

    with pytest.raises(KeyError), PipelineStage(0):
        Broken()
    assert stage_mark(nn.ReLU()) is None


# What is refused


@pytest.mark.parametrize("stage", ["1", 1.0, None, True])
def test_a_stage_that_is_no_int(stage):
    with pytest.raises(UsageTypeError, match=r"PipelineStage: the stage .* is a .*Pass an int"):
        PipelineStage(stage)


def test_a_negative_stage():
    with pytest.raises(UsageValueError, match="the stage -1 is negative"):
        PipelineStage(-1)


@pytest.mark.parametrize("thing", [nn.ReLU(), nn.ReLU, 3])
def test_what_cannot_be_decorated(thing):
    with pytest.raises(UsageTypeError, match="to decorate"):
        PipelineStage(0)(thing)


# The stages that come out


def places(strategy, *stages):
    """Return stage and IPU after each number."""
    assigner = StageAssigner(strategy)
    found = []
    for stage in stages:
        assigner.begin_stage(stage)
        found.append((assigner.current_stage(), assigner.current_ipu()))
    return found


def test_a_stage_is_on_the_ipu_of_its_number():
    for strategy in (
        poptorch.PipelinedExecution(),
        poptorch.ShardedExecution(),
        poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement),
    ):
        assert places(strategy, 0, 2) == [(0, 0), (2, 2)]


def test_listed_stages_are_on_their_own_ipus():
    strategy = poptorch.PipelinedExecution(
        poptorch.Stage().ipu(1), poptorch.Stage().ipu(0), poptorch.Stage()
    )
    assert places(strategy, 0, 1, 2) == [(0, 1), (1, 0), (2, 2)]


def test_a_stage_that_is_not_listed():
    strategy = poptorch.PipelinedExecution(poptorch.Stage().ipu(0))
    with pytest.raises(Error, match=r"PipelineStage\(1\): 1 stages have a device.*device_mapping"):
        places(strategy, 1)


def test_phases_have_no_numbers():
    with pytest.raises(Error, match=r"PipelineStage\(0\): .* has no numbered stages"):
        places(poptorch.SerialPhasedExecution("a"), 0)


class Model(nn.Module):
    """Two stages, with work before, between and after them."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = built_in(0, linear), built_in(1, linear)
        self.how = how
        if how != "built":
            for layer in (self.first, self.second):
                layer._forward_pre_hooks.clear()
        if how == "blocks":
            poptorch.BeginBlock(self.first, ipu_id=0)
            poptorch.BeginBlock(self.second, ipu_id=1)

    def forward(self, x):
        x = x * 2
        if self.how == "contexts":
            with poptorch.PipelineStage(0):
                x = self.first(x).relu()
            with poptorch.PipelineStage(1):
                x = self.second(x)
        else:
            x = self.second(self.first(x).relu())
        return poptorch.identity_loss(x.square(), "mean")


def trained(how):
    model = Model(how)
    training = poptorch.trainingModel(
        model, make_options(1, 4), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    torch.manual_seed(1)
    loss = training(torch.randn(8, 2))
    return loss, model.second.weight.detach().clone(), training.compiled


def test_all_ways_give_the_stages_of_blocks():
    loss, weight, compiled = trained("blocks")
    for how in ("contexts", "built"):
        other_loss, other_weight, other = trained(how)
        assert torch.equal(loss, other_loss) and torch.equal(weight, other_weight)
        assert other.executable.actions() == compiled.executable.actions()
        stages = [(op.kind, op.stage) for op in compiled.program.graph.ops]
        assert [(op.kind, op.stage) for op in other.program.graph.ops] == stages
