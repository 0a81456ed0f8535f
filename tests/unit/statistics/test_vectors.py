"""What is asked of the op ``statistics``, what its vector says, and the same from PyTorch."""

import dataclasses
import math

import pytest
import torch

from popsim_torch.errors import InternalError, UsageTypeError, UsageValueError
from popsim_torch.statistics import (
    Channels,
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    Sample,
    Statistics,
    TopK,
    attributes_of,
    decode,
    length_of,
    statistics_of,
)
from tests.ops.one_op import OneOp, dtype_name

EVERYTHING = (
    *(Moments(), Counts(), Histogram(1), TopK(5), Sample(7), Fingerprint()),
    Channels(-1),
)
EACH = [(), *((request,) for request in EVERYTHING), EVERYTHING, EVERYTHING[::-1]]
MOMENTS = ["mean", "std", "minimum", "maximum", "norm", "absolute_mean"]


def values(dtype, count=3000):
    x = torch.randn(count, generator=torch.Generator().manual_seed(1)) * 40
    if dtype.is_floating_point:
        x[::7] = 0
        x[5 : min(count, 400) : 50] = torch.nan
        x[6:count:500] = torch.inf
    return x.to(dtype)


def from_device(x, requests):
    attributes = attributes_of(requests, x.dim())
    outputs = [(torch.float64, (length_of(requests, x.shape),))]
    return decode(OneOp("statistics", [x], outputs, attributes).run()[0], requests, x.shape)


def assert_equal(actual, expected):
    for field in dataclasses.fields(Statistics):
        one, other = getattr(actual, field.name), getattr(expected, field.name)
        if field.name in MOMENTS and one is not None:
            assert one == pytest.approx(other, rel=1e-12, nan_ok=True), field.name
        elif field.name == "histogram" and one is not None:
            assert one.mantissa_bits == other.mantissa_bits
            assert torch.equal(one.negative, other.negative)
            assert torch.equal(one.positive, other.positive)
        elif field.name == "channels" and one is not None:
            assert one.count == other.count
            for name, numbers in vars(one).items():
                torch.testing.assert_close(
                    numbers, getattr(other, name), rtol=1e-12, atol=1e-14, equal_nan=True
                )
        elif isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other, field.name


@pytest.mark.parametrize("requests", EACH, ids=lambda requests: str(len(requests)))
def test_only_what_was_asked_for_is_there(requests):
    found = statistics_of(values(torch.float32), *requests)
    fields = {field.name for field in dataclasses.fields(found)} - {"count", "nans", "infs"}
    wanted = {
        Moments(): MOMENTS,
        Counts(): ["zeros", "subnormals", "half_overflows", "half_underflows"],
        Histogram(1): ["histogram"],
        TopK(5): ["top_values", "top_positions"],
        Sample(7): ["samples"],
        Fingerprint(): ["fingerprint"],
        Channels(-1): ["channels"],
    }
    there = {name for request in requests for name in wanted[request]}
    assert {name for name in fields if getattr(found, name) is not None} == there


@pytest.mark.parametrize("requests", EACH, ids=lambda requests: str(len(requests)))
def test_the_device_and_pytorch_agree(requests):
    x = values(torch.float32)
    assert_equal(from_device(x, requests), statistics_of(x, *requests))


@pytest.mark.parametrize("count", [0, 1, 3, 300])
@pytest.mark.parametrize(
    "dtype",
    [torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.uint8, torch.int64],
    ids=dtype_name,
)
def test_they_agree_for_all_dtypes(dtype, count):
    x = values(dtype, count) if dtype != torch.bool else values(torch.float32, count) > 0
    assert_equal(from_device(x, EVERYTHING), statistics_of(x, *EVERYTHING))


def test_known_numbers():
    x = torch.tensor([3.0, 0.0, -4.0, math.inf, math.nan, 70000.0]).to(torch.float32)
    found = statistics_of(x, Moments(), Counts(), TopK(9), Sample(3))
    assert (found.count, found.nans, found.infs) == (6, 1, 1)
    assert found.mean == 69999.0 / 4
    assert (found.minimum, found.maximum) == (-4.0, 70000.0)
    assert found.norm == math.sqrt(9 + 16 + 70000.0**2)
    assert found.absolute_mean == 70007.0 / 4
    assert (found.zeros, found.subnormals) == (1, 0)
    assert (found.half_overflows, found.half_underflows) == (1, 0)
    assert found.top_values.tolist() == [math.inf, 70000.0, -4.0, 3.0, 0.0]
    assert found.top_positions.tolist() == [3, 5, 2, 0, 1]
    assert found.samples.tolist()[:2] == [3.0, -4.0]
    assert math.isnan(found.samples[2])


def test_moments_without_finite_values_are_nan():
    for x in (torch.zeros(0), torch.full((4,), math.nan), torch.full((4,), -math.inf)):
        for found in (statistics_of(x, Moments()), from_device(x, (Moments(),))):
            assert all(math.isnan(getattr(found, name)) for name in MOMENTS)


def test_subnormals_are_those_of_the_dtype():
    x = torch.tensor([2.0**-15, 2.0**-14, 2.0**-130], dtype=torch.float32)
    assert statistics_of(x, Counts()).subnormals == 1
    assert statistics_of(x.half(), Counts()).subnormals == 1
    assert statistics_of(x.half(), Counts()).zeros == 1


def test_fingerprints_of_the_device_are_spread_over_64_bits():
    found = [statistics_of(values(torch.float32, n), Fingerprint()).fingerprint for n in (9, 99)]
    assert all(2**32 < one < 2**64 for one in found)
    assert found[0] != found[1]


def test_gradients_and_strides_do_not_matter():
    x = values(torch.float32).reshape(50, 60)
    expected = statistics_of(x, *EVERYTHING)
    assert_equal(statistics_of(x.T.contiguous().T.requires_grad_(), *EVERYTHING), expected)


@pytest.mark.parametrize(
    ("requests", "error", "message"),
    [
        ([Moments], UsageTypeError, "the class Moments asks for nothing"),
        (["mean"], UsageTypeError, "'mean' asks for nothing; pass any of Moments"),
        ([TopK(3), TopK(4)], UsageValueError, r"TopK\(k=3\) and TopK\(k=4\)"),
    ],
)
def test_requests_that_are_refused(requests, error, message):
    with pytest.raises(error, match=message):
        attributes_of(requests, 1)


def test_a_request_may_be_repeated():
    assert attributes_of([TopK(3), TopK(3)], 1) == attributes_of([TopK(3)], 1)


def test_channels_of_known_numbers():
    x = torch.tensor([[0.0, 3.0, math.nan], [-0.0, -4.0, 2.0]])
    found = statistics_of(x, Channels()).channels
    assert (found.count, found.dead.tolist()) == (2, [0])
    assert found.zeros.tolist() == [2, 0, 0] and found.nans.tolist() == [0, 0, 1]
    assert found.mean.tolist() == [0.0, -0.5, 2.0] and found.norm.tolist() == [0.0, 5.0, 2.0]
    assert found.minimum.tolist() == [0.0, -4.0, 2.0] and found.maximum.tolist() == [0.0, 3.0, 2.0]
    assert statistics_of(x, Channels(0)).channels.zeros.tolist() == [1, 1]


@pytest.mark.parametrize(("num_axes", "axis"), [(0, -1), (1, -1), (2, 1), (4, 1)])
def test_an_axis_that_a_tensor_does_not_have_is_left_out(num_axes, axis):
    assert attributes_of([Channels()], num_axes)["channels"] == axis
    shape = (3,) * num_axes
    assert length_of([Channels()], shape) == 3 + 7 * (3 if axis >= 0 else 0)


@pytest.mark.parametrize("axis", [1, -2])
def test_statistics_of_refuses_an_axis_that_is_not_there(axis):
    with pytest.raises(UsageValueError, match=rf"axis={axis}\).*shape \[3\] does not have"):
        statistics_of(torch.ones(3), Channels(axis))


@pytest.mark.parametrize("axis", [1.0, True, "1", None])
def test_an_axis_that_is_no_integer_is_refused(axis):
    with pytest.raises(UsageTypeError, match="Channels: axis is an integer"):
        Channels(axis)


@pytest.mark.parametrize(
    "x", [[1.0], torch.zeros(2, dtype=torch.complex64)], ids=["list", "complex"]
)
def test_values_that_are_refused(x):
    with pytest.raises(UsageTypeError, match="statistics_of"):
        statistics_of(x)


@pytest.mark.parametrize(
    "vector", [torch.zeros(4, dtype=torch.float64), torch.zeros(3), torch.zeros(0)], ids=str
)
def test_a_vector_of_another_length_or_dtype_is_refused(vector):
    with pytest.raises(InternalError, match="decode: the statistics of 0 values are 3 numbers"):
        decode(vector, (), (0,))
