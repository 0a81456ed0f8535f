"""Stages that take the same time, and the times of layers in the table of stages."""

import itertools
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.stages.balance import balanced_pipeline_stages


@dataclass
class Op:
    scope: str
    seconds: float
    phase: str = "forward"


def model(count=3):
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


def nested():
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


def stages_of(net):
    table = []
    poptorch.print_pipeline_stage_assignment_summary(net, print_fn=table.append)
    return [int(line.split()[-1]) for line in table if line[-1].isdigit()]


def slowest(seconds, stages):
    sums = {}
    for one, stage in zip(seconds, stages, strict=True):
        sums[stage] = sums.get(stage, 0) + one
    return max(sums.values())


def splits(count, num_stages):
    """Yield all ways to divide a row of layers."""
    for cuts in itertools.combinations(range(1, count), num_stages - 1):
        yield [sum(place >= cut for cut in cuts) for place in range(count)]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=7), st.integers(1, 7))
def test_no_other_way_is_faster(seconds, num_stages):
    if num_stages > len(seconds) or not any(seconds):
        return
    net = model(len(seconds))
    ops = [Op(f"{i}/inner", one) for i, one in enumerate(seconds)]
    poptorch.set_pipeline_stage_assignment(net, balanced_pipeline_stages(net, ops, num_stages))
    stages = stages_of(net)
    assert sorted(set(stages)) == list(range(num_stages))
    best = min(slowest(seconds, one) for one in splits(len(seconds), num_stages))
    assert slowest(seconds, stages) == best


def test_both_passes_count_and_updates_do_not():
    ops = [Op("0", 1), Op("1", 1), Op("2", 1), Op("0", 3, "backward"), Op("2", 9, "update")]
    records = balanced_pipeline_stages(model(), ops, 2)
    assert [record.stage for record in records] == [0, 1, 1]


def test_a_nested_model_is_cut():
    net = nested()
    poptorch.set_pipeline_stage_assignment(
        net, balanced_pipeline_stages(net, [Op("0", 1), Op("1/0", 1), Op("1/1", 2)], 2)
    )
    assert stages_of(net) == [0, 0, 1]


def test_a_part_of_the_model_that_was_profiled():
    ops = [Op("net/0", 5), Op("net/1", 1), Op("net/2", 1), Op("loss", 50), Op("", 50)]
    records = balanced_pipeline_stages(model(), ops, 2, prefix="net")
    assert [record.stage for record in records] == [0, 1, 1]


def test_what_is_measured(capsys):
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 600), nn.ReLU()))

        def forward(self, x):
            return poptorch.identity_loss(self.net(x), "mean")

    whole = Loss()
    trainer = poptorch.trainingModel(whole)
    profile = trainer.profile(torch.randn(400, 8), repeats=3)
    trainer.destroy()
    stages = poptorch.balanced_pipeline_stages(whole.net, profile, 2, prefix="net")
    poptorch.set_pipeline_stage_assignment(whole.net, stages)
    poptorch.print_pipeline_stage_assignment_summary(
        whole.net, 100, details=True, profile=profile, prefix="net"
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[-4:] == ["Forward", "us", "Backward", "us"]
    rows = {line.split()[0]: line.split()[-2:] for line in lines if line[0] not in "_="}
    measured = [op for op in profile if op.scope.startswith("net/1")]
    for column, phase in enumerate(("forward", "backward")):
        seconds = sum(op.seconds for op in measured if op.phase == phase)
        shown = [float(rows[layer][column]) for layer in ("1.0", "1.1")]
        assert sum(shown) == pytest.approx(1e6 * seconds, abs=0.2)
    assert sum(line.startswith("Stage ") for line in lines) == 2


def test_times_alone():
    table = []
    poptorch.print_pipeline_stage_assignment_summary(
        model(2), 54, table.append, profile=[Op("0", 2.5e-6), Op("1", 1e-6, "backward")]
    )
    assert [line.split()[-2:] for line in table[3:5]] == [["2.5", "0.0"], ["0.0", "1.0"]]
    assert table[6].split() == ["Stage", "-", "-", "2.5", "1.0"]


@pytest.mark.parametrize(
    ("num_stages", "ops", "kind", "text"),
    [
        (2.0, [Op("0", 1)], UsageTypeError, "num_stages is 2.0. Pass an int"),
        (True, [Op("0", 1)], UsageTypeError, "num_stages is True. Pass an int"),
        (0, [Op("0", 1)], UsageValueError, "pass 1 to 3"),
        (4, [Op("0", 1)], UsageValueError, "num_stages is 4, and the model has 3 layers"),
        (2, [Op("net/0", 1)], UsageValueError, "no op of the layers 0, 1, 2 .*Pass the result"),
    ],
)
def test_mistakes(num_stages, ops, kind, text):
    with pytest.raises(kind, match=text):
        balanced_pipeline_stages(model(), ops, num_stages)
