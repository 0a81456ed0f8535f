"""Numbers drawn by methods and distributions: their range, moments and element type."""

import pytest
import torch
from torch import distributions, nn

import popsim_torch as poptorch
from tests.parity.compare import quiet_options

SIZE = 20_000


class Draws(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, x):
        return self._function(x)


def draw(function):
    """Return what a function of 20,000 ones draws on the device."""
    options = quiet_options(seed=3)
    return poptorch.inferenceModel(Draws(function), options)(torch.ones(SIZE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32, torch.int8])
@pytest.mark.parametrize(
    "bounds", [lambda t: t.random_(-3, 7), lambda t: t.random_(**{"from": -3, "to": 7})]
)
def test_random_between_two_bounds(bounds, dtype):
    drawn = draw(lambda x: bounds(torch.empty(SIZE, dtype=dtype)))
    assert drawn.dtype == dtype
    counts = torch.bincount(drawn.long() + 3)
    assert len(counts) == 10
    assert counts.min() > 0.9 * SIZE / 10


@pytest.mark.parametrize(
    ("dtype", "low", "largest"),
    [(torch.int8, 120, 127), (torch.float16, 2040, 2048), (torch.bool, 0, 1)],
)
def test_random_up_to_the_largest(dtype, low, largest):
    drawn = draw(lambda x: torch.empty(SIZE, dtype=dtype).random_(low, None))
    assert drawn.dtype == dtype
    assert drawn.long().unique().tolist() == list(range(low, largest + 1))


def test_random_writes_where_it_is_told():
    def function(x):
        table = x.new_zeros(2, 4)
        table[1].random_(5, 6)
        return table

    model = poptorch.inferenceModel(Draws(function), quiet_options())
    assert model(torch.ones(2)).tolist() == [[0.0] * 4, [5.0] * 4]


HOST = torch.full((SIZE,), 0.5)
OF_HOST_TENSORS = {
    "rand_like": (lambda: torch.rand_like(HOST), 0.5, 0.2887),
    "normal_": (lambda: HOST.clone().normal_(), 0.0, 1.0),
    "bernoulli": (lambda: torch.bernoulli(HOST), 0.5, 0.5),
    "normal": (lambda: torch.normal(HOST, 1.0), 0.5, 1.0),
    "normal by keywords": (lambda: torch.normal(mean=HOST, std=2 * HOST), 0.5, 1.0),
    "rrelu": (lambda: torch.rrelu(-HOST, 0.0, 2.0, training=True), -0.5, 0.2887),
    "normal with a size": (lambda: torch.normal(1.0, 2.0, (SIZE,)), 1.0, 2.0),
}


@pytest.mark.parametrize("name", OF_HOST_TENSORS)
def test_numbers_drawn_for_host_tensors_differ_from_run_to_run(name):
    function, mean, deviation = OF_HOST_TENSORS[name]
    model = poptorch.inferenceModel(Draws(lambda x: function() + 0 * x), quiet_options(seed=3))
    first, second = model(torch.ones(SIZE)), model(torch.ones(SIZE))
    assert not torch.equal(first, second)
    assert second.mean().item() == pytest.approx(mean, abs=0.05)
    assert second.std().item() == pytest.approx(deviation, rel=0.05)
    assert torch.equal(HOST, torch.full((SIZE,), 0.5))


def test_a_generator_of_the_host_is_refused():
    generator = torch.Generator()
    model = poptorch.inferenceModel(
        Draws(lambda x: x + torch.randn(3, generator=generator)), quiet_options()
    )
    with pytest.raises(poptorch.Error, match=r"test_drawn_numbers.py:\d+ .*Options.randomSeed"):
        model(torch.ones(3))


# Distribution of tensors of ones, its mean and its standard deviation.
DISTRIBUTIONS = {
    "Exponential": (lambda x: distributions.Exponential(2 * x), 0.5, 0.5),
    "Laplace": (lambda x: distributions.Laplace(x, x), 1.0, 2**0.5),
    "Gumbel": (lambda x: distributions.Gumbel(x, x), 1.5772, 1.2825),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("method", ["sample", "rsample"])
def test_distribution(name, method):
    make, mean, deviation = DISTRIBUTIONS[name]
    drawn = draw(lambda x: getattr(make(x), method)())
    assert drawn.mean().item() == pytest.approx(mean, abs=0.05)
    assert drawn.std().item() == pytest.approx(deviation, rel=0.05)


def test_gradient_through_a_sample():
    """A sample of Exponential is a number over its rate."""

    class Samples(nn.Module):
        def __init__(self):
            super().__init__()
            self.rate = nn.Parameter(torch.full((5,), 2.0))

        def forward(self, x):
            drawn = distributions.Exponential(self.rate * x).rsample()
            return drawn, poptorch.identity_loss(drawn.sum(), "none")

    model = Samples()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=1.0)
    device = poptorch.trainingModel(model, quiet_options(), optimizer)
    drawn, _ = device(torch.ones(5))
    device.copyWeightsToHost()
    torch.testing.assert_close(model.rate.detach(), 2 + drawn / 2, rtol=1e-5, atol=1e-6)
