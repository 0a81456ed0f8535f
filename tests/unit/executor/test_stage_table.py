"""``executor.stages()``: what each stage has, and how long it takes."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.executor.pipelined import WIDTH, compiled, wrap

pytestmark = pytest.mark.filterwarnings("ignore:The model specifies")
PARAMETERS = WIDTH * WIDTH + WIDTH


def test_each_stage_has_its_modules_and_sizes():
    table = compiled(3, ipus=[1, 0, 2]).stages()
    assert [row.stage for row in table] == [0, 1, 2]
    assert [row.ipu for row in table] == [1, 0, 2]
    assert [row.modules for row in table] == [("layers.0",), ("layers.1",), ("layers.2",)]
    for row in table:
        # (the velocity of SGD with momentum; the gradients are added to it)
        assert (row.parameters, row.parameter_bytes) == (PARAMETERS, 4 * PARAMETERS)
        assert row.state_bytes == 2 * 4 * PARAMETERS  # the velocity and the accumulator
        assert row.forward is row.backward is row.share is row.seconds is None
    assert table.balance is None and table.source == ""
    assert "Times: not measured" in str(table) and "record_timeline" in str(table)


def test_threads_are_those_of_the_lanes():
    executor = compiled(4)
    lanes = executor.compiled.executable.plan.lane_of_stage
    assert [row.thread for row in executor.stages()] == lanes


def test_times_of_a_recorded_run():
    executor, x = wrap(2, ga=8)
    executor.compile(x)
    executor.record_timeline()
    executor(x)
    table, times = executor.stages(), executor.timeline().stages
    assert table.source == "recorded run"
    assert [row.forward for row in table] == [one.forward for one in times]
    assert [row.backward for row in table] == [one.backward for one in times]
    assert sum(row.share for row in table) == pytest.approx(1)
    seconds = [row.seconds for row in table]
    assert table.balance == pytest.approx(sum(seconds) / 2 / max(seconds))
    assert f"the slowest stage is {seconds.index(max(seconds))}" in str(table)
    assert f"{1e6 * table[0].forward:.1f}" in str(table)


def test_times_of_a_profile():
    executor, x = wrap(2, ga=4, d=2)
    profile = executor.profile(x, repeats=3)
    table = executor.stages(profile)
    assert table.source == "profile"
    for row in table:
        for phase, found in (("forward", row.forward), ("backward", row.backward)):
            own = [op.seconds for op in profile if (op.phase, op.stage) == (phase, row.stage)]
            assert found == pytest.approx(sum(own) / 8) and found > 0
    with pytest.raises(TypeError, match=r"stages: the profile is a int\. Pass the result of"):
        executor.stages(3)


def test_inference_has_no_backward_times():
    executor, x = wrap(2, d=4, training=False)
    executor.compile(x)
    executor.record_timeline()
    executor(x)
    (first, _) = table = executor.stages()
    assert first.forward > 0 and first.backward is None and first.state_bytes == 0
    assert first.seconds == first.forward and len(table[:1]) == 1


class Mixed(nn.Module):
    """A nested model with a shared layer, running statistics and a frozen weight."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.shared = nn.Linear(4, 4, bias=False)
        self.head = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 2)})
        self.head["b"].bias.requires_grad_(False)

    def forward(self, x):
        with poptorch.Block("one", ipu_id=0):
            x = self.shared(self.encoder(x))
        with poptorch.Block("two", ipu_id=1):
            x = self.head["b"](self.head["a"](self.shared(x)))
            return poptorch.identity_loss(x.square(), "mean")


def test_shared_parameters_and_statistics_count_where_they_are_used():
    model = Mixed()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, make_options(1, 4), optimizer)
    executor.compile(torch.randn(12, 4))
    one, two = executor.stages()
    assert one.modules == ("encoder", "shared")
    assert two.modules == ("shared", "head")
    assert one.parameters == 20 + 8 + 16 and two.parameters == 16 + 20 + 10
    # Two moments, a step counter for each weight, an accumulator; two buffers of four numbers.
    assert one.state_bytes == 4 * (3 * 44 + 5 + 2 * 4)
    assert two.state_bytes == 4 * (3 * 44 + 4)  # none for the frozen bias


def test_a_model_without_stages_is_one_stage():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    executor = poptorch.inferenceModel(model, make_options())
    executor.compile(torch.randn(2, 3))
    (row,) = executor.stages()
    assert row.modules == ("0", "1", "2", "3") and row.parameters == 48
    assert "0-3" in str(executor.stages())


def test_places_of_weights_and_states():
    """Shards of replicas and memory off the chip: figures, and the same values."""
    found = {}
    for moved in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(128, 128)
        options = make_options(1, 2).replicationFactor(4)
        if moved:
            shared = poptorch.TensorLocationSettings().useReplicatedTensorSharding(True)
            away = poptorch.TensorLocationSettings().useOnChipStorage(False)
            options.TensorLocations.setWeightLocation(shared).setOptimizerLocation(away)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(Squares(model), options, optimizer)
        torch.manual_seed(1)
        training(torch.randn(1 * 2 * 4 * 3, 128))
        found[moved] = training.stages(), model.weight.detach().clone()
    (plain,), (placed,) = found[False][0], found[True][0]
    numel = 128 * 128 + 128
    assert plain.placed.on_chip == plain.parameter_bytes + plain.state_bytes
    assert plain.placed.off_chip == 0
    # A quarter of the weight, which has enough elements; the bias as a whole. A step is a number.
    weights = 4 * (128 * 128 // 4 + 128)
    steps = 2 * 4
    assert placed.placed.off_chip == 2 * 4 * numel
    assert placed.placed.on_chip == weights + 4 * numel + steps
    text = str(found[True][0])
    assert f"place {placed.placed.off_chip:,} bytes beside the IPUs" in text
    assert f"a replica keeps {placed.placed.on_chip + placed.placed.off_chip:,} bytes" in text
    assert "beside" not in str(found[False][0])
    assert torch.equal(found[False][1], found[True][1])


class Squares(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return poptorch.identity_loss(self.linear(x).square().mean(), "none")
