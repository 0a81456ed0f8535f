"""Names of tensors that cross stages of a model, and of the counters of running means."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from popsim_torch.enums import MeanReductionStrategy, PipelineSchedule
from tests.options import make_options

ACCUMULATION, UPDATES = 5, 2
STASH = ("Stashed___", "Restored___")


class Net(nn.Module):
    """Three layers on IPUs 0, 1 and 2."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        with poptorch.Block("a", ipu_id=0):
            x = torch.tanh(self.a(x))
        with poptorch.Block("b", ipu_id=1):
            x = torch.sigmoid(self.b(x))
        with poptorch.Block("c", ipu_id=2):
            return poptorch.identity_loss(self.c(x).square(), "mean")


def run(
    anchors=(),
    *,
    strategy=None,
    schedule=None,
    running=False,
    recomputation=None,
    mode=OutputMode.All,
):
    torch.manual_seed(1)
    accumulation = ACCUMULATION if schedule is None else 6
    options = make_options(UPDATES, accumulation)
    if schedule is not None:
        options.pipelineSchedule(schedule)
    options.autoRoundNumIPUs(True)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    if running:
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(
            MeanReductionStrategy.Running
        )
    if recomputation is not None:
        options._Popart.set("autoRecomputation", recomputation)
    for name in anchors:
        options.anchorTensor(name, name, mode)
    net = Net()
    model = poptorch.trainingModel(
        net, options, poptorch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)
    )
    model(torch.randn(UPDATES * accumulation * 2, 4))
    model.copyWeightsToHost()
    return model, net


def original(name):
    """Return the name of the tensor that a stash belongs to."""
    return name.removeprefix("Stashed___").removeprefix("Restored___")


@pytest.mark.parametrize("recomputation", [0, None], ids=["kept", "rebuilt"])
def test_stashes_hold_what_forward_computed(recomputation):
    plain, alone = run(recomputation=recomputation)
    stashes = [name for name in plain.getTensorNames() if name.startswith(STASH)]
    assert {"Stashed___Tanh:0", "Restored___Tanh:0"} <= set(stashes)
    # The results of the last stage are used at once.
    assert not any("c/" in name for name in stashes)
    assert {original(name) for name in stashes} <= set(plain.getTensorNames())
    if recomputation == 0:
        assert "Restored___Sigmoid:0" in stashes

    model, looked_at = run([*stashes, *map(original, stashes)], recomputation=recomputation)
    for name in stashes:
        found = model.getAnchoredTensor(name)
        assert found.abs().sum() > 0
        assert torch.equal(found, model.getAnchoredTensor(original(name))), name
    for parameter, other in zip(looked_at.parameters(), alone.parameters(), strict=True):
        assert torch.equal(parameter, other)


def test_copies_are_named_by_the_ipu_that_reads():
    names = ["Tanh:0_c1", "Sigmoid:0_c2", "Gradient___Sigmoid:0_c1", "Gradient___Tanh:0_c0"]
    plain, alone = run()
    assert {n for n in plain.getTensorNames() if n[-3:-1] == "_c"} == set(names)
    model, looked_at = run([*names, *(name[:-3] for name in names)])
    for name in names:
        assert torch.equal(model.getAnchoredTensor(name), model.getAnchoredTensor(name[:-3]))
    assert torch.equal(looked_at.a.weight, alone.a.weight)


def test_without_a_pipeline_nothing_is_stashed():
    sharded = run(strategy=poptorch.ShardedExecution(poptorch.AutoStage.SameAsIpu))[0]
    assert not any(name.startswith(STASH) for name in sharded.getTensorNames())
    assert "Tanh:0_c1" in sharded.getTensorNames()


PIPELINE_COUNTERS = [f"Counter____VGraph{stage}_PStage{stage}" for stage in range(3)]


def test_counters_of_running_means():
    assert not any(name.startswith("Counter") for name in run()[0].getTensorNames())
    plain, alone = run(running=True)
    listed = {name for name in plain.getTensorNames() if name.startswith("Counter")}
    assert listed == set(PIPELINE_COUNTERS)
    model, looked_at = run(PIPELINE_COUNTERS, running=True)
    for name in PIPELINE_COUNTERS:
        assert model.getAnchoredTensor(name).tolist() == [1, 2, 3, 4, 5] * UPDATES
    assert torch.equal(looked_at.a.weight, alone.a.weight)


@pytest.mark.parametrize("mode, value", [(OutputMode.Final, 0), (OutputMode.Sum, 30)])
def test_a_counter_begins_anew_with_each_update(mode, value):
    sharded = poptorch.ShardedExecution(poptorch.AutoStage.SameAsIpu)
    name = "Counter____VGraph1"
    model, _ = run([name], running=True, strategy=sharded, mode=mode)
    assert model.getAnchoredTensor(name).item() == value


def test_an_error_says_when_such_a_tensor_exists():
    with pytest.raises(poptorch.Error, match="Running"):
        run(["Counter____VGraph0"])


@pytest.mark.parametrize("schedule", [PipelineSchedule.Grouped, PipelineSchedule.Interleaved])
def test_the_last_stage_stashes_where_its_backward_pass_comes_later(schedule):
    plain, alone = run(schedule=schedule, recomputation=0)
    stashes = [name for name in plain.getTensorNames() if name.startswith(STASH)]
    assert {"Stashed___c/Gemm:0", "Restored___c/Gemm:0"} <= set(stashes)
    model, looked_at = run([*stashes, *map(original, stashes)], schedule=schedule, recomputation=0)
    for name in stashes:
        assert torch.equal(model.getAnchoredTensor(name), model.getAnchoredTensor(original(name)))
    assert torch.equal(looked_at.a.weight, alone.a.weight)
