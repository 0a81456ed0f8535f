"""Statistics of channels, observed in programs: dead ones, several axes, several names."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.statistics import Channels, Counts, Moments, merge, statistics_of
from tests.options import make_options

DEAD = [1, 4]


class Net(nn.Module):
    """Images, a convolution with dead channels, and a linear layer with a dead unit."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 6, 3)
        self.fc = nn.Linear(6 * 4 * 4, 5)
        with torch.no_grad():
            self.conv.bias[DEAD] = -100
            self.fc.bias[2] = -100

    def forward(self, x):
        planes = self.conv(x).relu()
        return self.fc(planes.flatten(1)).relu()


def images(count=4):
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def observed(*calls, anchors=(), **settings):
    """Run inference; return what is observed and anchored."""
    options = make_options(**settings)
    for select, *requests in calls:
        options.observe(select, *requests, every=1)
    for name in anchors:
        options.anchorTensor(name, name, output_mode=poptorch.OutputMode.Final)
    inference = poptorch.inferenceModel(Net().eval(), options)
    inference(images())
    found = inference.observations() if calls else []
    records = {record.name: record.statistics for record in found}
    return records, {name: inference.getAnchoredTensor(name) for name in anchors}


def assert_channels(found, expected):
    assert found.count == expected.count
    for name, numbers in vars(expected).items():
        torch.testing.assert_close(
            getattr(found, name), numbers, rtol=1e-12, atol=1e-12, equal_nan=True
        )


def test_dead_channels_of_images_and_of_units():
    records, _ = observed(("*Relu*", Channels()))
    dead = [found.channels.dead.tolist() for found in records.values()]
    assert dead == [DEAD, [2]]
    found, *_ = records.values()
    assert found.channels.zeros.shape == (6,) and found.channels.count == 4 * 4 * 4
    by_hand = (found.channels.zeros == found.channels.count).nonzero().reshape(-1)
    assert by_hand.tolist() == DEAD


@pytest.mark.parametrize("axis", [0, 1, -1, -2, 3])
def test_they_are_those_of_the_anchored_tensor(axis):
    records, _ = observed(("*", Channels(axis), Moments()))
    names = [name for name in records if "Relu" in name or "Conv" in name]
    _, anchored = observed(anchors=names)
    compared = 0
    for name, value in anchored.items():
        num_axes = value.dim()
        if Channels(axis).axis_of(num_axes) < 0:
            assert records[name].channels is None
            continue
        expected = statistics_of(value, Channels(axis), Moments())
        assert_channels(records[name].channels, expected.channels)
        assert records[name].mean == pytest.approx(expected.mean, rel=1e-12)
        compared += 1
    assert compared >= 2


def test_views_of_the_same_values_have_channels_of_their_own():
    class Views(nn.Module):
        def forward(self, x):
            y = x.relu()
            return y, y.flatten(1), y.transpose(1, 2)

    inference = poptorch.inferenceModel(Views(), make_options().observe("*", Channels(), every=1))
    y = images().relu()
    inference(images())
    found = {one.name: one.statistics.channels for one in inference.observations()}
    for name, value in (("Relu", y), ("Reshape", y.flatten(1)), ("Transpose", y.transpose(1, 2))):
        assert_channels(found[f"{name}:0"], statistics_of(value, Channels()).channels)


def test_over_all_micro_batches_of_an_iteration():
    def run(over):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU())
        options = make_options(2, 3)
        options.observe("inner*Relu:0", Channels(), Counts(), every=1, over=over)
        training = poptorch.trainingModel(
            Loss(model), options, torch.optim.SGD(model.parameters(), lr=0.1)
        )
        training(torch.randn(12, 4, generator=torch.Generator().manual_seed(1)))
        return training.observations()

    class Loss(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            torch.manual_seed(0)
            nn.init.normal_(inner[0].weight)
            nn.init.constant_(inner[0].bias, -2.0)

        def forward(self, x):
            return poptorch.identity_loss(self.inner(x), "sum")

    apart, together = run("micro_batch"), run("iteration")
    assert (len(apart), len(together)) == (6, 2)
    for record in together:
        parts = [one.statistics for one in apart if one.step == record.step]
        assert_channels(record.statistics.channels, merge(parts).channels)
        assert record.statistics.channels.count == 6
        assert record.statistics.channels.zeros.sum() == record.statistics.zeros


def test_tensors_without_the_axis_have_no_channels():
    records, _ = observed(("*conv*", Channels()))
    assert records["conv.bias"].channels is None and records["conv.bias"].count == 6
    assert len(records["conv.weight"].channels.zeros) == 3


def test_an_axis_that_no_tensor_has(caplog):
    records, _ = observed(("*.bias", Channels()), ("fc.weight", Channels(2)))
    assert all(found.channels is None for found in records.values())
    lines = [line.getMessage() for line in caplog.records]
    (first,) = [line for line in lines if "Channels(axis=1)" in line]
    assert "'conv.bias' has most axes, its shape is [6]. Pass another axis" in first
    (second,) = [line for line in lines if "Channels(axis=2)" in line]
    assert "'fc.weight' has most axes, its shape is [5, 96]" in second
    caplog.clear()
    observed(("*", Channels()))
    assert "Channels" not in caplog.text


def test_two_axes_of_one_tensor():
    with pytest.raises(
        poptorch.Error, match=r"axis=1\) and .*axis=0\) are asked for of 'fc.weight'"
    ):
        observed(("fc.*", Channels()), ("fc.weight", Channels(0)))
    records, _ = observed(("fc.weight", Channels()), ("fc.weight", Channels(-1), Moments()))
    assert len(records["fc.weight"].channels.zeros) == 96
    records, _ = observed(("fc.*", Channels()), ("fc.bias", Channels(0)))
    assert len(records["fc.bias"].channels.zeros) == 5


def test_they_are_recorded(tmp_path):
    options = make_options().observe("*Relu*", Channels(), every=1)
    inference = poptorch.inferenceModel(Net().eval(), options)
    with poptorch.RunWriter(tmp_path / "a.popsim") as writer:
        inference.add_sink(writer)
        inference(images())
        inference.close_sinks()
    records = poptorch.Run(tmp_path / "a.popsim").records()
    assert [one.statistics.channels.dead.tolist() for one in records] == [DEAD, [2]]


def test_pytorch_itself_is_recorded_with_channels(tmp_path):
    model = Net()
    with poptorch.eager_record(model, tmp_path / "a.popsim", Channels()):
        model(images())
    records = {one.name: one.statistics for one in poptorch.Run(tmp_path / "a.popsim").records()}
    assert records["conv"].channels.maximum[DEAD].lt(0).all()
    assert len(records["fc"].channels.zeros) == 5
