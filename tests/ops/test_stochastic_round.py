"""Rounding to float16 at random: unbiased, to a neighbour, and the same for the same seed."""

import math

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.passes.native_graph import to_native

COUNT = 100_000
# Standard errors; a correct generator fails one test in a million.
SIGMAS = 5.0
INF = math.inf


def rounded(values: torch.Tensor, seed=1, stream=0, step=0) -> torch.Tensor:
    graph = ir.Graph()
    count = values.untyped_storage().nbytes() // values.element_size()
    base = graph.add_tensor(ir.TensorKind.VARIABLE, values.dtype, (count,))
    x = graph.add_view(base, values.shape, values.stride(), values.storage_offset())
    out = graph.add_tensor(ir.TensorKind.VARIABLE, torch.float16, values.shape)
    attributes = {"stream": stream}
    graph.add_op("stochastic_round", [x], [out], attributes, phase=ir.Phase.FORWARD, name="it")
    config = _native.RunConfig(1, 1, False, "sequential")
    with _native.translated_errors():
        executable = _native.Executable(to_native(graph), config)
        executable.write(base.id, values.as_strided((count,), (1,), 0))
        executable.load()
        executable.seed, executable.step = seed, step
        executable.run([])
        return executable.read(out.id)


VALUES = [
    *(1 + 2.0**-11, 1 + 2.0**-12, 1 + 2.0**-23, -3.14159, 65503.0, 1000.3),
    *(1e-5, -3e-6, 2.0**-25, 2.0**-26 * 3, 6e-8, 1e-9, 2.0**-14 - 2.0**-30),
]


@pytest.mark.parametrize("value", VALUES)
def test_the_mean_is_the_number(value):
    results = rounded(torch.full((COUNT,), value)).double()
    exact = torch.tensor(value).double().item()
    below = torch.tensor(exact).half()
    if below.double() > exact:
        below = torch.nextafter(below, torch.tensor(-INF).half())
    above = torch.nextafter(below, torch.tensor(INF).half())
    low, high = below.double().item(), above.double().item()
    assert set(results.unique().tolist()) <= {low, high}
    chance = (exact - low) / (high - low)
    error = abs((results == high).double().mean().item() - chance)
    assert error <= SIGMAS * math.sqrt(chance * (1 - chance) / COUNT) + 2.0**-23


def test_numbers_that_float16_has_stay():
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    every = every[~every.isnan()]
    assert torch.equal(rounded(every.float()).view(torch.int16), every.view(torch.int16))


def test_beyond_the_largest_number_it_is_rounded_to_nearest():
    values = torch.tensor([65504.0, 65519.0, 65520.0, 1e30, INF, -65519.0, -65520.0, -INF])
    expected = [65504.0, 65504.0, INF, INF, INF, -65504.0, -INF, -INF]
    for seed in range(5):
        assert rounded(values, seed).tolist() == expected
    assert rounded(torch.tensor([math.nan])).isnan()


@pytest.mark.parametrize("other", [{"seed": 2}, {"seed": 1 + 2**32}, {"stream": 8}, {"step": 1}])
def test_numbers_depend_on_seed_stream_and_step(other):
    values = torch.full((1000,), 1 + 2.0**-11)
    first = rounded(values)
    assert torch.equal(first, rounded(values))
    agreeing = (first == rounded(values, **other)).sum().item()
    assert abs(agreeing - 500) < SIGMAS * math.sqrt(250)


def test_neighbours_are_independent():
    up = (rounded(torch.full((COUNT,), 1 + 2.0**-11)) > 1).double() - 0.5
    for distance in (1, 2, 32, 64, 128, 512):
        correlation = 4 * (up[distance:] * up[:-distance]).mean().item()
        assert abs(correlation) < SIGMAS / math.sqrt(COUNT - distance)


def test_an_operand_may_lie_in_any_order():
    values = torch.rand(37, 50)
    assert torch.equal(rounded(values.t().contiguous().t()), rounded(values))
