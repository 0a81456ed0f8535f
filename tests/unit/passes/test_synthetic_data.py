"""Inputs that the device generates itself."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.ir import TensorKind
from tests.options import make_options


def synthetic(*args, mode=2, seed=1):
    options = make_options(*args, seed=seed)
    options.enableSyntheticData(True)
    if mode != 2:
        options._Popart.set("syntheticDataMode", mode)
    return options


class Applied(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def model_of(function, options=None):
    return poptorch.inferenceModel(Applied(function), options or synthetic())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_floats_are_normal_and_new_in_every_micro_batch(dtype):
    options = synthetic(2).outputMode(poptorch.OutputMode.All)
    model = model_of(lambda x: x * 1, options)
    x = torch.full((2, 50_000), 7.0, dtype=dtype)
    first, second = model(x), model(x)
    assert first.shape == x.shape and first.dtype == dtype
    for values in (*first.double(), *second.double()):
        assert abs(values.mean()) < 5 / 50_000**0.5
        assert abs(values.var() - 1) < 5 * (2 / 50_000) ** 0.5
    assert len({values.float().sum().item() for values in (*first, *second)}) == 4


def test_inputs_differ_and_follow_from_the_seed():
    def run(seed):
        return model_of(lambda a, b: (a * 1, b * 1), synthetic(seed=seed))(x, x)

    x = torch.ones(1000)
    first, second = run(1)
    assert not torch.equal(first, second)
    assert torch.equal(first, run(1)[0])
    assert not torch.equal(first, run(2)[0])


def test_random_numbers_need_not_be_probabilities():
    def function(x, y):
        return nn.functional.binary_cross_entropy(x.sigmoid(), y)

    x = torch.full((5, 7), 0.5)
    assert model_of(function)(x, x).isfinite()
    assert model_of(function, synthetic(mode=1))(x, x).isfinite()
    with pytest.raises(poptorch.Error, match="target should be between 0 and 1"):
        model_of(function, make_options())(x, x + 1)


def test_integers_are_valid_labels_and_indices():
    def function(index, mask):
        return index + 0, torch.logical_or(mask, mask)

    index, mask = model_of(function)(torch.full((3,), 99), torch.ones(3, dtype=torch.bool))
    assert index.tolist() == [0, 0, 0]
    assert mask.tolist() == [False] * 3


def test_zeros():
    options = synthetic(mode=1)
    assert model_of(lambda x: x + 1, options)(torch.full((3,), 5.0)).tolist() == [1, 1, 1]


def test_an_unknown_mode_is_refused():
    model = model_of(lambda x: x + 1, synthetic(mode=3))
    with pytest.raises(poptorch.Error, match=r"syntheticDataMode .* 0 to 2"):
        model(torch.ones(2))


def test_nothing_is_read_of_the_hosts_tensors_or_written_to_them():
    def function(x):
        x += 1
        return x * 2

    model = model_of(function)
    x = torch.full((4,), float("nan"))
    assert model(x).isfinite().all()
    assert x.isnan().all()
    assert all(t.kind != TensorKind.INPUT for t in model.compiled.program.graph.tensors)
    with pytest.raises(poptorch.Error):
        model(torch.ones(5))


def test_inputs_keep_their_names():
    options = synthetic()
    options.anchorTensor("x", "input")
    model = model_of(lambda x: x * 1, options)
    assert torch.equal(model(torch.ones(4)), model.getAnchoredTensor("x"))


class Net(nn.Module):
    def __init__(self, ipu):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5, 8)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self._ipu = ipu

    def forward(self, x, index, y):
        poptorch.Block.start(ipu_id=0)
        hidden = torch.tanh(self.first(x) + self.table(index))
        poptorch.Block.start(ipu_id=self._ipu)
        out = self.second(hidden)
        return out, nn.functional.cross_entropy(out, y)


@pytest.mark.parametrize("recomputation", [0, 4])
def test_training_in_a_pipeline(recomputation, monkeypatch):
    monkeypatch.setenv("POPSIM_VERIFY_PASSES", "1")
    results = []
    for ipu in (0, 1):
        net, options = Net(ipu), synthetic(2, 4)
        options._Popart.set("autoRecomputation", recomputation)
        model = poptorch.trainingModel(net, options, torch.optim.SGD(net.parameters(), lr=0.1))
        before = net.first.weight.detach().clone()
        x, index = torch.zeros(16, 4), torch.full((16,), 77)
        out, loss = model(x, index, index)
        assert out.shape == (2, 3)
        assert loss.isfinite().all()
        assert not torch.equal(net.first.weight, before)
        results.append([value.clone() for value in net.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_a_profile_needs_no_inputs_either():
    times = model_of(lambda x: x * 2).profile(torch.ones(3))
    assert "random" in str(times)
