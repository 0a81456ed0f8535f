"""Batch norm with ``momentum=None`` averages over all micro-batches, as its counter says."""

import copy
import logging

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options
from tests.parity.compare import Loop, Pair, assert_close
from tests.parity.tolerances import ONE_PASS, TRAINED

NORMS = {
    "1d": (nn.BatchNorm1d, (4,)),
    "1d with length": (nn.BatchNorm1d, (4, 5)),
    "2d": (nn.BatchNorm2d, (4, 3, 3)),
    "3d": (nn.BatchNorm3d, (4, 2, 2, 3)),
}


class Net(nn.Module):
    """Two stages; the norm is on the second one, and is called twice if asked to."""

    def __init__(self, kind=nn.BatchNorm1d, stages=(0, 0), uses=1, **settings):
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.norm = kind(4, momentum=None, **settings)
        self._stages, self._uses = stages, uses

    def forward(self, x):
        poptorch.Block.start(ipu_id=self._stages[0])
        x = torch.sin(x * self.scale.view(-1, *[1] * (x.dim() - 2)))
        poptorch.Block.start(ipu_id=self._stages[1])
        for _ in range(self._uses):
            x = self.norm(x + 1)
        return x, poptorch.identity_loss((x**2 * x.detach().cos()).mean(), "none")


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def compare_training(net, shape, loop, calls=2, dtype=torch.float32):
    pair = Pair(net, sgd, loop=loop, tolerance=TRAINED[dtype])
    for _ in range(calls):
        pair.step(torch.randn(16 * loop.micro_batches, *shape).to(dtype))
        pair.finish()
        counter = net.norm.num_batches_tracked
        assert counter == pair.twin.norm.num_batches_tracked
        assert counter.dtype == torch.int64


@pytest.mark.parametrize("kind, shape", NORMS.values(), ids=NORMS)
def test_training(kind, shape):
    compare_training(Net(kind), shape, Loop())


@pytest.mark.parametrize("stages", [(0, 0), (0, 1)], ids=["one stage", "pipeline"])
def test_every_micro_batch_counts(stages):
    compare_training(Net(nn.BatchNorm2d, stages), (4, 3, 3), Loop(2, 4))


def test_a_norm_that_is_called_twice_counts_twice():
    compare_training(Net(uses=2), (4,), Loop(2, 2))


def test_a_count_goes_on_from_where_it_was():
    net = Net()
    net.norm.num_batches_tracked.fill_(7)
    net.norm.running_mean.fill_(2)
    compare_training(net, (4,), Loop(1, 2))


def test_without_weights():
    compare_training(Net(affine=False), (4,), Loop(2))


def test_half():
    compare_training(Net().half(), (4,), Loop(2, 2), dtype=torch.float16)


def test_rebuilt_values_change_no_bit():
    counted = []
    x = torch.randn(12, 4)
    for mode in (0, 3):
        net = Net()
        options = make_options(1, 3)
        options._Popart.set("autoRecomputation", mode)
        poptorch.trainingModel(net, options, sgd(net))(x)
        counted.append(net.state_dict())
    assert counted[0]["norm.num_batches_tracked"] == 3
    assert all(torch.equal(counted[0][name], counted[1][name]) for name in counted[0])


def test_inference_counts_in_train_mode_alone():
    net = Net()
    twin = copy.deepcopy(net)
    x = torch.randn(12, 4)
    model = poptorch.inferenceModel(net, make_options(3))
    with torch.no_grad():
        expected = torch.cat([twin(part)[0] for part in x.split(4)])
    assert_close(model(x)[0], expected, ONE_PASS[torch.float32])
    model.copyWeightsToHost()
    assert net.norm.num_batches_tracked == 3
    torch.testing.assert_close(net.norm.running_var, twin.norm.running_var)
    evaluated = poptorch.inferenceModel(net.eval(), make_options())
    with torch.no_grad():
        expected = twin.eval()(x)[0]
    assert_close(evaluated(x)[0], expected, ONE_PASS[torch.float32])
    evaluated.copyWeightsToHost()
    assert net.norm.num_batches_tracked == 3


def test_two_executors_share_the_count():
    net = Net()
    x = torch.randn(6, 4)
    training = poptorch.trainingModel(net, make_options(), sgd(net))
    training(x)
    other = poptorch.inferenceModel(net, make_options())
    other(x)
    other.copyWeightsToHost()
    assert net.norm.num_batches_tracked == 2
    training.copyWeightsToDevice()
    training(x)
    assert net.norm.num_batches_tracked == 3


def test_a_state_is_saved_and_loaded():
    net = Net()
    x = torch.randn(6, 4)
    training = poptorch.trainingModel(net, make_options(), sgd(net))
    training(x)
    state = {name: value.clone() for name, value in training.state_dict().items()}
    assert state["norm.num_batches_tracked"] == 1
    training(x)
    training.load_state_dict(state)
    training(x)
    again = Net()
    again.load_state_dict(state)
    poptorch.trainingModel(again, make_options(), sgd(again))(x)
    assert again.norm.num_batches_tracked == 2
    for name, value in net.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_a_file_keeps_the_count(tmp_path):
    net = Net()
    x = torch.randn(6, 4)
    training = poptorch.trainingModel(net, make_options(), sgd(net))
    training(x)
    training.save(tmp_path / "file")
    loaded = poptorch.load(tmp_path / "file")
    training(x)
    loaded(x)
    for name, value in net.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name]), name
    assert loaded.state_dict()["norm.num_batches_tracked"] == 2


def test_a_cached_program_holds_no_count(tmp_path):
    x = torch.randn(6, 4)
    counts = []
    for start in (0, 5):
        net = Net()
        net.norm.num_batches_tracked.fill_(start)
        options = make_options()
        options.enableExecutableCaching(tmp_path)
        poptorch.trainingModel(net, options, sgd(net))(x)
        counts.append(net.norm.num_batches_tracked.item())
    assert counts == [1, 6]
    assert len(list(tmp_path.glob("*.*"))) == 1


def test_the_counter_can_be_uploaded_alone():
    net = Net()
    options = make_options()
    options.updatableNamedBuffers(["norm.num_batches_tracked"])
    model = poptorch.inferenceModel(net, options)
    model(torch.randn(6, 4))
    net.norm.num_batches_tracked.fill_(9)
    model.copyNamedBuffersToDevice()
    model(torch.randn(6, 4))
    model.copyWeightsToHost()
    assert net.norm.num_batches_tracked == 10


def test_the_counter_is_not_called_a_constant(caplog):
    model = poptorch.inferenceModel(Net(), make_options())
    with caplog.at_level(logging.WARNING):
        model(torch.randn(6, 4))
    assert "num_batches_tracked" not in caplog.text
