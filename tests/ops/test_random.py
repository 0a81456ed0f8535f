"""The random op: distributions, and numbers that depend on seed, op and step alone."""

import math
from collections.abc import Sequence

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native

COUNT = 200_000
# Standard errors; a correct generator fails one test in a million.
SIGMAS = 5.0


class RandomProgram:
    """A graph with random ops of one kind; every run begins the next micro-batch.

    Args:
        shape: Of the outputs.
        dtype: Of the outputs.
        num_ops: How many equal ops there are.
        p: Probabilities, as an attribute or as an input.
        attributes: The op's other attributes.
    """

    def __init__(self, shape: Sequence[int], dtype=torch.float32, num_ops=1, p=None, **attributes):
        graph = ir.Graph()
        inputs = []
        if isinstance(p, float):
            attributes["p"] = p
        elif p is not None:
            count = p.untyped_storage().nbytes() // p.element_size()
            base = graph.add_tensor(ir.TensorKind.VARIABLE, p.dtype, (count,))
            inputs = [graph.add_view(base, p.shape, p.stride(), p.storage_offset())]
        self._outputs = []
        attributes |= {"shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        for stream in range(num_ops):
            out = graph.add_tensor(ir.TensorKind.VARIABLE, dtype, shape)
            draws = {"stream": stream, **attributes}
            graph.add_op("random", inputs, [out], draws, phase=ir.Phase.FORWARD, name="noise")
            self._outputs.append(out)
        config = _native.RunConfig(1, 1, False, "sequential")
        with _native.translated_errors():
            self.executable = _native.Executable(to_native(graph), config)
            if inputs:
                self.executable.write(base.id, p.as_strided((count,), (1,), 0))
            self.executable.load()

    def run(self) -> list[torch.Tensor]:
        self.executable.run([])
        return [self.executable.read(out.id) for out in self._outputs]


def draw(shape, dtype=torch.float32, seed=1, **attributes) -> torch.Tensor:
    program = RandomProgram(shape, dtype, **attributes)
    program.executable.seed = seed
    return program.run()[0]


def uniform(shape=(COUNT,), low=0.0, high=1.0, **options) -> torch.Tensor:
    return draw(shape, distribution="uniform", **{"from": low, "to": high}, **options)


def normal(shape=(COUNT,), mean=0.0, std=1.0, **options) -> torch.Tensor:
    return draw(shape, distribution="normal", mean=mean, std=std, **options)


def bernoulli(shape=(COUNT,), **options) -> torch.Tensor:
    return draw(shape, distribution="bernoulli", **options)


def assert_mean(values: torch.Tensor, mean: float, std: float) -> None:
    error = abs(values.double().mean().item() - mean)
    assert error < SIGMAS * std / math.sqrt(values.numel())


def assert_distribution(values: torch.Tensor, cdf) -> None:
    """Kolmogorov-Smirnov: the largest distance between the two distribution functions."""
    ordered = values.double().sort().values
    rank = torch.arange(len(ordered), dtype=torch.float64) / len(ordered)
    distance = (cdf(ordered) - rank).abs().max().item()
    assert distance < 2.7 / math.sqrt(len(ordered))


def test_uniform():
    values = uniform()
    assert values.min() >= 0
    assert values.max() < 1
    assert_distribution(values, lambda x: x)


def test_uniform_between_bounds():
    values = uniform(low=-3.0, high=5.0)
    assert values.min() >= -3
    assert values.max() < 5
    assert_distribution(values, lambda x: (x + 3) / 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 1.25), (-1.0, 0.0), (100.0, 101.0)])
def test_uniform_never_reaches_the_upper_bound(dtype, low, high):
    values = uniform(low=low, high=high, dtype=dtype)
    assert values.dtype == dtype
    assert values.min() >= low
    assert values.max() < high


def test_uniform_of_an_empty_range():
    assert torch.equal(uniform((5,), 2.0, 2.0), torch.full((5,), 2.0))


def test_normal():
    values = normal()
    assert_mean(values, 0.0, 1.0)
    assert_mean(values**2, 1.0, math.sqrt(2.0))
    assert_mean(values**3, 0.0, math.sqrt(15.0))
    assert_mean(values**4, 3.0, math.sqrt(96.0))
    assert_distribution(values, torch.special.ndtr)
    assert values.isfinite().all()
    assert values.abs().max() > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_normal_with_mean_and_std(dtype):
    values = normal(mean=2.0, std=0.5, dtype=dtype)
    assert values.dtype == dtype
    tolerance = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps
    assert abs(values.double().mean() - 2.0) < SIGMAS * 0.5 / math.sqrt(COUNT) + tolerance
    assert abs(values.double().std() - 0.5) < 0.01


def test_normal_without_spread():
    assert torch.equal(normal((7,), 3.0, 0.0), torch.full((7,), 3.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_bernoulli(p, dtype):
    values = bernoulli(p=p, dtype=dtype)
    assert values.dtype == dtype
    assert set(values.float().unique().tolist()) == {0.0, 1.0}
    assert_mean(values, p, math.sqrt(p * (1 - p)))


def test_certain_outcomes():
    assert not bernoulli(p=0.0).any()
    assert bernoulli(p=1.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_bernoulli_with_a_tensor_of_probabilities(dtype):
    p = torch.tensor([0.0, 0.25, 0.75, 1.0], dtype=dtype)
    values = RandomProgram((50_000, 4), distribution="bernoulli", p=p.expand(50_000, 4)).run()[0]
    assert not values[:, 0].any()
    assert values[:, 3].all()
    assert_mean(values[:, 1], 0.25, 0.433)
    assert_mean(values[:, 2], 0.75, 0.433)


def test_bernoulli_with_a_strided_tensor_of_probabilities():
    p = (torch.rand(300, 70) > 0.5).float()
    (values,) = RandomProgram((70, 300), distribution="bernoulli", p=p.t()).run()
    assert torch.equal(values, p.t())


def test_the_same_seed_gives_the_same_numbers():
    assert torch.equal(normal(seed=5), normal(seed=5))
    assert not torch.equal(normal(seed=5), normal(seed=6))
    assert not torch.equal(normal(seed=5), normal(seed=5 + 2**32))


def test_every_micro_batch_draws_its_own_numbers():
    program = RandomProgram((1000,), distribution="normal", mean=0.0, std=1.0)
    (first,), (second,) = program.run(), program.run()
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.2
    program.executable.step = 0
    assert torch.equal(program.run()[0], first)
    assert torch.equal(program.run()[0], second)


def test_every_op_draws_its_own_numbers():
    program = RandomProgram((1000,), num_ops=2, distribution="normal", mean=0.0, std=1.0)
    first, second = program.run()
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.2


def test_ops_of_one_stream_draw_the_same_numbers():
    program = RandomProgram((100,), num_ops=2, distribution="normal", mean=0.0, std=1.0, stream=7)
    first, second = program.run()
    assert torch.equal(first, second)


@pytest.mark.parametrize("numel", [1, 15, 64, 1000, 1024, 1025, 70_001])
def test_an_element_depends_on_its_position_only(numel):
    assert torch.equal(normal((numel,)), normal()[:numel])
    assert torch.equal(uniform((1, numel)).flatten(), uniform()[:numel])


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10, as its paper defines it."""
    mask = 2**32 - 1
    for _ in range(10):
        left, right = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            (right >> 32) ^ counter[1] ^ key[0],
            right & mask,
            (left >> 32) ^ counter[3] ^ key[1],
            left & mask,
        ]
        key = [(key[0] + 0x9E3779B9) & mask, (key[1] + 0xBB67AE85) & mask]
    return counter


def test_numbers_are_those_of_philox():
    known = [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]
    counter = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
    assert philox(counter, [0xA4093822, 0x299F31D0]) == known

    attributes = {"distribution": "uniform", "from": 0.0, "to": 1.0, "stream": 7}
    program = RandomProgram((300,), **attributes)
    program.executable.seed = 2**40 + 5
    program.executable.step = 2**33 + 3
    (values,) = program.run()
    for element in range(300):
        group, place = divmod(element, 128)
        word, lane = divmod(place, 32)
        words = philox([group * 32 + lane, 7, 3, 2], [5, 2**8])
        assert values[element].item() == (words[word] >> 8) / 2**24


def test_neighbours_are_not_correlated():
    values = normal()
    for distance in (1, 2, 16, 32, 64, 1024):
        product = values[distance:] * values[:-distance]
        assert_mean(product, 0.0, 1.0)


def test_numbers_do_not_depend_on_the_number_of_threads():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = normal()
        torch.set_num_threads(4)
        assert torch.equal(normal(), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("attributes", "problem"),
    [
        ({"distribution": "bernoulli", "p": 1.5}, "p is in .0, 1., not 1.5"),
        ({"distribution": "uniform", "from": 1.0, "to": 0.0}, "from <= to, not 1 and 0"),
        ({"distribution": "normal", "mean": 0.0, "std": -1.0}, "std is at least 0, not -1"),
    ],
)
def test_impossible_parameters_are_refused(attributes, problem):
    with pytest.raises(InternalError, match=rf"'noise' \(random\): must hold: {problem}"):
        RandomProgram((3,), **attributes)


def test_an_unknown_distribution_is_refused():
    with pytest.raises(InternalError, match="attribute 'distribution' allows 'cauchy'"):
        RandomProgram((3,), distribution="cauchy")
