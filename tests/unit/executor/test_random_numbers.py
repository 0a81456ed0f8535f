"""Seeds, and the state of the random number generators."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.executor.nets import TOLERANCE, infer, make_options, train


class Drops(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 16)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        out = self.drop(self.fc(x))
        return out, poptorch.identity_loss(out, "sum")


def drops(seed, net=None):
    torch.manual_seed(0)
    net = net or Drops()
    return train(net, make_options(seed=seed), poptorch.optim.SGD(net.parameters(), lr=0.0))


X = torch.ones(8, 4)


def test_the_same_seed_gives_the_same_numbers():
    one, two, other = drops(3), drops(3), drops(4)
    for _ in range(3):
        expected = one(X)[0]
        assert torch.equal(expected, two(X)[0])
        assert not torch.equal(expected, other(X)[0])


def test_numbers_differ_between_calls_and_micro_batches():
    torch.manual_seed(0)
    net = Drops()
    options = make_options(2, 2, seed=3)
    options.outputMode(poptorch.OutputMode.All)
    model = train(net, options, poptorch.optim.SGD(net.parameters(), lr=0.0))
    masks = [part.bool() for _ in range(2) for part in model(X)[0].split(2)]
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert not torch.equal(mask, other)


def test_half_the_elements_survive_and_are_doubled():
    torch.manual_seed(0)
    net = Drops()
    model = drops(3, net)
    out, loss = model(torch.ones(512, 4))
    full = net.fc(torch.ones(1, 4)).detach()
    kept = out != 0
    assert 0.45 < kept.float().mean() < 0.55
    torch.testing.assert_close(out, torch.where(kept, 2 * full, 0.0), **TOLERANCE)
    torch.testing.assert_close(loss, out.sum(), rtol=1e-4, atol=1e-3)


def test_the_gradient_has_the_mask_of_forward():
    torch.manual_seed(0)
    net = Drops()
    options = make_options(seed=3)
    options.anchorTensor("g", "Gradient___fc/Gemm:0")
    model = train(net, options)
    out, _ = model(X)
    assert torch.equal(model.getAnchoredTensor("g"), 2.0 * (out != 0))


def test_rng_state_round_trip():
    model = drops(3)
    model(X)
    state = model.rng_state
    assert all(type(number) is int for number in state)
    expected = [model(X)[0] for _ in range(3)]
    model.rng_state = state
    for value in expected:
        assert torch.equal(model(X)[0], value)


def test_rng_state_moves_to_another_executor():
    first, second = drops(3), drops(99)
    first(X)
    state = first.rng_state
    expected = first(X)[0]
    second.compile(X)
    second.rng_state = state
    assert torch.equal(second(X)[0], expected)


def test_reading_rng_state_changes_nothing():
    one, two = drops(3), drops(3)
    one(X), two(X)
    _ = one.rng_state
    assert torch.equal(one(X)[0], two(X)[0])


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63, 2**64 - 1])
def test_large_and_negative_seeds(seed):
    model = drops(seed)
    out, _ = model(X)
    assert model.rng_state == [seed % 2**64, 1]
    assert torch.equal(out, drops(seed)(X)[0])
    assert not torch.equal(out, drops(seed // 2 + 1)(X)[0])


@pytest.mark.parametrize(
    "state", [[1], [1, 2, 3], [], [-1, 0], [2**64, 0], [0, -1], [0, 2**63], [1.5, 2]]
)
def test_a_state_that_is_none(state):
    model = drops(3)
    model.compile(X)
    with pytest.raises(poptorch.Error, match="rng_state"):
        model.rng_state = state


def test_dropout_is_the_identity_in_inference():
    net = Drops().train()
    out, _ = infer(net)(X)
    torch.testing.assert_close(out, net.fc(X).detach(), **TOLERANCE)


def test_random_seed_seeds_torch_too():
    make_options(seed=11)
    expected = torch.rand(3)
    make_options(seed=11)
    assert torch.equal(torch.rand(3), expected)


def test_a_run_leaves_torchs_generator_alone():
    model = drops(3)
    model(X)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model(X)
    assert torch.equal(torch.rand(3), expected)
