"""The op statistics, against NumPy in float64 and against Python's integers."""

import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from popsim_torch import _native, build_info, ir
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native
from tests.ops.num_threads import threads
from tests.ops.one_op import LAYOUTS, OneOp, dtype_name

F64 = torch.float64
EVERYTHING = {
    "moments": True,
    "counts": True,
    "histogram": 2,
    "top": 8,
    "samples": 16,
    "fingerprint": True,
    "channels": -1,
}
NOTHING = {
    "moments": False,
    "counts": False,
    "histogram": -1,
    "top": 0,
    "samples": 0,
    "fingerprint": False,
    "channels": -1,
}
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
WHOLE = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
MOMENTS = ["mean", "std", "minimum", "maximum", "norm", "absolute_mean"]
COUNTS = ["zeros", "subnormals", "half_overflows", "half_underflows"]
ROOT = Path(__file__).parents[2]


def length_of(asked, numel, num_channels=0):
    bins = 512 << asked["histogram"] if asked["histogram"] >= 0 else 0
    return (
        3
        + 6 * asked["moments"]
        + 4 * asked["counts"]
        + 2 * asked["fingerprint"]
        + 2 * min(asked["top"], numel)
        + min(asked["samples"], numel)
        + bins
        + 7 * num_channels
    )


def compiled(x, *, has_reference=True, **asked):
    asked = {**NOTHING, **asked}
    num_channels = x.shape[asked["channels"]] if asked["channels"] >= 0 else 0
    outputs = [(F64, (length_of(asked, x.numel(), num_channels),))]
    return OneOp("statistics", [x], outputs, asked, has_reference=has_reference)


def vector(x, **asked):
    return compiled(x, **asked).run()[0].numpy()


def wide(x):
    """Return the values in row-major order, in float64."""
    return x.to(F64).reshape(-1).numpy()


def narrow(x):
    """Return the magnitudes as the bits of float32."""
    return wide(x).astype(np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)


def moments(x):
    found = vector(x, moments=True)
    assert len(found) == 9
    return dict(zip(MOMENTS, found[3:], strict=True))


def expected_moments(x):
    values = wide(x)
    values = values[np.isfinite(values)]
    if not len(values):
        return dict.fromkeys(MOMENTS, 0.0)
    mean = values.mean()
    mean += (values - mean).mean()
    return {
        "mean": mean,
        "std": math.sqrt(np.square(values - mean).mean()),
        "minimum": values.min(),
        "maximum": values.max(),
        "norm": math.sqrt(np.square(values).sum()),
        "absolute_mean": np.abs(values).mean(),
    }


def assert_moments(x, close=1e-12):
    actual, expected = moments(x), expected_moments(x)
    for name in MOMENTS:
        # A mean near zero has the error of its terms.
        slack = 1e-14 * expected["absolute_mean"] if name == "mean" else 0.0
        assert actual[name] == pytest.approx(expected[name], rel=close, abs=slack), name


def sample(dtype, shape):
    generator = torch.Generator().manual_seed(1)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * 3 + 1).to(dtype)
    low, high = (0, 2) if dtype == torch.bool else (0, 256)
    if dtype.is_signed:
        info = torch.iinfo(dtype)
        low, high = max(info.min, -(2**40)), min(info.max, 2**40)
    return torch.randint(low, high, shape, generator=generator).to(dtype)


# --- Every part, every dtype, every layout ------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [*FLOATS, *WHOLE, F64], ids=dtype_name)
@pytest.mark.parametrize("shape", [(70, 131), (7,), (), (3, 1, 5, 2), (2048,), (4097,)], ids=str)
def test_each_part(shape, dtype, layout):
    x = layout(sample(dtype, shape)) if shape else sample(dtype, shape)
    assert_moments(x)
    found = vector(x, **EVERYTHING)
    assert found[:3].tolist() == [x.numel(), 0, 0]
    assert_counts(x, found[9:13])
    assert (int(found[14]) << 32) | int(found[13]) == fingerprint(x)
    most, few = min(8, x.numel()), min(16, x.numel())
    assert_top(x, found[15 : 15 + most], found[15 + most : 15 + 2 * most])
    samples = found[15 + 2 * most :][:few]
    assert samples.tolist() == wide(x)[np.arange(few) * x.numel() // max(few, 1)].tolist()
    assert_histogram(x, found[15 + 2 * most + few :], 2)


def assert_counts(x, found):
    sizes, values = narrow(x), wide(x)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float32).astype(np.float16)
    tiny = 0x38800000 if x.dtype == torch.float16 else 0x00800000
    assert dict(zip(COUNTS, found.tolist(), strict=True)) == {
        "zeros": (sizes == 0).sum(),
        "subnormals": ((sizes != 0) & (sizes < tiny)).sum(),
        "half_overflows": (np.isfinite(values) & ~np.isfinite(halves)).sum(),
        "half_underflows": ((sizes != 0) & (halves == 0)).sum(),
    }


def assert_top(x, values, positions):
    wanted = [(-abs(value), i) for i, value in enumerate(wide(x).tolist()) if value == value]
    wanted = sorted(wanted)[: len(values)]
    places = [i for _, i in wanted] + [-1] * (len(values) - len(wanted))
    assert positions.tolist() == places
    assert values.tolist() == [wide(x)[i] if i >= 0 else 0.0 for i in places]


def assert_histogram(x, found, mantissa_bits):
    bits = wide(x).astype(np.float32).view(np.uint32)
    bins = np.bincount(bits >> (23 - mantissa_bits), minlength=512 << mantissa_bits)
    half = 256 << mantissa_bits
    assert found.tolist() == [*bins[half:], *bins[:half]]


def mix(x):
    keep = (1 << 64) - 1
    z = (x + 1) * 0x9E3779B97F4A7C15 & keep
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & keep
    z = (z ^ z >> 27) * 0x94D049BB133111EB & keep
    return z ^ z >> 31


def key(i):
    return (mix(i % 256) | 1) ^ (mix(2**32 + i // 256) & ~1)


def fingerprint(x):
    """Return the fingerprint, by its definition."""
    if x.is_floating_point():
        bits, upper = wide(x).astype(np.float32).view(np.uint32).tolist(), []
    else:
        whole = x.reshape(-1).to(torch.int64).tolist()
        bits = [value & 0xFFFFFFFF for value in whole]
        signs = [0xFFFFFFFF if low >> 31 else 0 for low in bits]
        upper = [value >> 32 & 0xFFFFFFFF ^ s for value, s in zip(whole, signs, strict=True)]
    total = sum(value * key(i) for i, value in enumerate(bits))
    total += sum(value * key(2**40 + i) for i, value in enumerate(upper))
    return total % 2**64


def test_repeated_values():
    x = torch.arange(6.0).view(1, 6, 1).expand(50, 6, 70)
    assert_moments(x)
    assert vector(x, fingerprint=True).tolist() == vector(x.contiguous(), fingerprint=True).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64], ids=dtype_name)
def test_nothing_is_there(dtype):
    x = torch.zeros((0, 4), dtype=dtype)
    found = vector(x, **EVERYTHING)
    assert len(found) == length_of(EVERYTHING, 0)
    assert not found.any()


def test_nothing_is_asked():
    assert vector(sample(torch.float32, (9, 9))).tolist() == [81, 0, 0]


# --- Numbers of all sizes -----------------------------------------------------

UNUSUAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-25, 2.0**-25 * (1 + 2**-23), 2.0**-24, 2**-14]
UNUSUAL += [6e-5, 65504.0, 65519.99, 65520.0, -65520.0, 1e30, -3.4e38, 1.0, -1.0]
NOT_FINITE = [math.inf, -math.inf, math.nan, -math.nan]


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_name)
@pytest.mark.parametrize("count", [1, 15, 16, 17, 40, 2049, 70_000])
@pytest.mark.parametrize("others", [[], NOT_FINITE], ids=["finite", "all"])
def test_unusual_numbers(dtype, count, others):
    values = torch.tensor([*UNUSUAL, *others], dtype=F64).to(torch.float32)
    x = values.repeat(-(-count // len(values)))[:count].to(dtype)
    assert_moments(x)
    found = vector(x, **EVERYTHING)
    assert found[0] == count
    assert found[1] == x.isnan().sum()
    assert found[2] == x.isinf().sum()
    assert_counts(x, found[9:13])
    most = min(8, count)
    assert_top(x, found[15 : 15 + most], found[15 + most : 15 + 2 * most])
    assert_histogram(x, found[-2048:], 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_number_is_finite(value):
    found = vector(torch.full((3000,), value), **EVERYTHING)
    is_nan = math.isnan(value)
    assert found[:3].tolist() == [3000, 3000 * is_nan, 3000 * (not is_nan)]
    assert not found[3:13].any()
    positions = [-1] * 8 if is_nan else list(range(8))
    assert found[23:31].tolist() == positions


@pytest.mark.parametrize("value", [0.1, -3.7e30, 1e-42, 123456.789])
@pytest.mark.parametrize("count", [1, 3, 1000, 100_003])
def test_a_constant(value, count):
    x = torch.full((count,), value)
    number = x[0].item()
    found = moments(x)
    assert (found["mean"], found["std"]) == (number, 0.0)
    assert (found["minimum"], found["maximum"]) == (number, number)
    assert found["norm"] == pytest.approx(abs(number) * math.sqrt(count), rel=1e-14)


@pytest.mark.parametrize("values", [[0.0, -0.0], [-0.0, 0.0, -0.0]])
def test_extremes_are_never_minus_zero(values):
    found = moments(torch.tensor(values * 50))
    assert math.copysign(1, found["minimum"]) == math.copysign(1, found["maximum"]) == 1


@pytest.mark.parametrize(("mean", "std"), [(1e6, 1.0), (-1e6, 0.1), (3.0, 1.0), (1e30, 1e25)])
def test_many_numbers_of_a_large_mean(mean, std):
    x = torch.randn(10_000_000, generator=torch.Generator().manual_seed(2)) * std + mean
    found = compiled(x, moments=True, has_reference=False).run()[0].numpy()[3:]
    for actual, expected in zip(found, expected_moments(x).values(), strict=True):
        assert actual == pytest.approx(expected, rel=1e-12)


def test_whole_numbers_of_a_large_mean():
    x = torch.randint(-2, 3, (300_000,), generator=torch.Generator().manual_seed(2)) + 10**9
    assert_moments(x)
    assert_moments(x.to(torch.int32))


def test_a_slope():
    assert_moments(torch.arange(1_000_000, dtype=torch.float32))
    assert_moments(torch.arange(1_000_000, dtype=torch.int32) + 10**9)


@pytest.mark.parametrize("mantissa_bits", [0, 1, 2, 3])
@pytest.mark.parametrize("count", [100, 100_001])
def test_histograms(mantissa_bits, count):
    x = torch.randn(count, generator=torch.Generator().manual_seed(3))
    x = x * 10 ** (x * 5)
    assert_histogram(x, vector(x, histogram=mantissa_bits)[3:], mantissa_bits)


# --- The largest values -------------------------------------------------------


@pytest.mark.parametrize("k", [1, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=dtype_name)
def test_the_largest_of_many(dtype, k):
    x = sample(dtype, (100_000,))
    found = vector(x, top=k)
    assert_top(x, found[3 : 3 + k], found[3 + k :])


@pytest.mark.parametrize("order", ["rising", "falling", "equal"])
def test_the_largest_in_an_order(order):
    x = torch.arange(5000.0)
    x = {"rising": x, "falling": -x.flip(0), "equal": torch.ones(5000)}[order]
    found = vector(x, top=5)
    assert_top(x, found[3:8], found[8:])


# --- Fingerprints -------------------------------------------------------------


def test_any_bit_changes_the_fingerprint():
    x = sample(torch.float32, (600,))
    found = {fingerprint_on_device(x)}
    for place in (0, 255, 256, 599):
        for bit in range(32):
            changed = x.clone()
            changed.view(torch.int32)[place] ^= -(1 << 31) if bit == 31 else 1 << bit
            found.add(fingerprint_on_device(changed))
    assert len(found) == 1 + 4 * 32


def fingerprint_on_device(x):
    return tuple(compiled(x, fingerprint=True, has_reference=False).run()[0][3:].tolist())


def test_the_order_changes_the_fingerprint():
    x = sample(torch.float32, (3000,))
    assert fingerprint_on_device(x) != fingerprint_on_device(x.flip(0))
    assert fingerprint_on_device(torch.zeros(9)) != fingerprint_on_device(-torch.zeros(9))


def test_the_dtype_does_not_change_the_fingerprint():
    x = sample(torch.float16, (3000,))
    assert fingerprint_on_device(x) == fingerprint_on_device(x.float())
    whole = sample(torch.int8, (3000,))
    assert fingerprint_on_device(whole) == fingerprint_on_device(whole.to(torch.int64))


# --- In a program -------------------------------------------------------------


def test_statistics_of_values_in_a_program():
    """Of a value and of its transposed view, put together in one tensor."""
    x = sample(torch.float32, (40, 30))
    graph = ir.Graph()
    weight = graph.add_tensor(ir.TensorKind.VARIABLE, x.dtype, x.shape)
    value = graph.add_tensor(ir.TensorKind.VALUE, x.dtype, x.shape)
    asked = {**NOTHING, "moments": True, "fingerprint": True}
    length = length_of(asked, x.numel())
    results = [graph.add_tensor(ir.TensorKind.VALUE, F64, (length,)) for _ in range(2)]
    both = graph.add_tensor(ir.TensorKind.VARIABLE, F64, (2 * length,))
    view = graph.add_view(value, (30, 40), (1, 30), 0)
    forward = {"phase": ir.Phase.FORWARD}
    graph.add_op("copy", [weight], [value], **forward, name="value")
    for source, result in zip((value, view), results, strict=True):
        graph.add_op("statistics", [source], [result], asked, **forward, name="statistics")
    graph.add_op("cat", results, [both], {"axis": 0}, **forward, name="both")
    with _native.translated_errors():
        config = _native.RunConfig(1, 1, False, "sequential")
        executable = _native.Executable(to_native(graph), config)
        executable.write(weight.id, x)
        executable.load()
        executable.run([])
    found = executable.read(both.id).reshape(2, length)
    for row, values in zip(found, (x, x.T), strict=True):
        assert torch.equal(row, compiled(values, **asked).run()[0])
    assert (found[0, -2:] != found[1, -2:]).any()


# --- Threads, processors, rules -----------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32], ids=dtype_name)
def test_the_number_of_threads_changes_nothing(dtype):
    x = sample(dtype, (1_000_003,))
    results = []
    for count in (1, 2, 3):
        with threads(count):
            op = compiled(x, **EVERYTHING)
            results += [op.run()[0], op.run()[0]]
    assert all(torch.equal(result, results[0]) for result in results)


TRANSPOSED = {
    "matrix": lambda: sample(torch.float32, (700, 501)).T,
    "batch": lambda: sample(torch.float16, (3, 33, 400)).mT,
    "image": lambda: sample(torch.float32, (2, 9, 11, 24)).permute(0, 3, 1, 2),
    "narrow": lambda: sample(torch.float32, (5000, 9)).T,
    "flat": lambda: sample(torch.int16, (16, 5000)).T,
    "few rows": lambda: sample(torch.float32, (4000, 31))[:, :9].T,
    "long rows": lambda: sample(torch.float32, (20, 5000)).T,
    "part": lambda: sample(torch.float32, (90, 70)).T[3:60, 5:],
    "four": lambda: sample(torch.bfloat16, (3, 17, 5, 40)).permute(2, 3, 0, 1),
}


@pytest.mark.parametrize("x", TRANSPOSED.values(), ids=TRANSPOSED)
def test_the_layout_changes_nothing_but_the_order_of_sums(x):
    x = x()
    x[x > 2.5] = 0
    unordered = {**NOTHING, "moments": True, "counts": True, "histogram": 1, "samples": 9}
    for asked in (EVERYTHING, unordered):
        one, other = (compiled(y, **asked).run()[0] for y in (x, x.contiguous()))
        assert torch.equal(one[:3], other[:3])
        torch.testing.assert_close(one[3:9], other[3:9], rtol=1e-12, atol=1e-14)
        assert torch.equal(one[9:], other[9:])


def test_the_first_of_equal_values_in_a_transposed_tensor():
    x = torch.ones(300, 200).T
    found = vector(x, top=9)
    assert found[12:].tolist() == list(range(9))
    x[150, 7] = x[3, 250] = -1
    assert vector(x, top=9)[12:].tolist() == list(range(9))


def inputs_of_all_kinds():
    """Return tensors, by name, whose statistics go through each way that a kernel may take."""
    dtypes = [*FLOATS, *WHOLE, F64]
    inputs = {dtype_name(dtype): sample(dtype, (300_001,)) for dtype in dtypes}
    inputs |= {f"{dtype_name(dtype)}, transposed": sample(dtype, (210, 131)).T for dtype in dtypes}
    for dtype in [*FLOATS, F64]:
        values = torch.tensor([*UNUSUAL, *NOT_FINITE], dtype=F64).to(torch.float32)
        inputs[f"{dtype_name(dtype)}, unusual"] = values.repeat(1000).to(dtype)
    # Of many numbers, sums that are rounded otherwise can have the same last bit all the same.
    for count in range(1000, 1020):
        few = sample(F64, (count,)) / 3  # the squares have more digits than float64
        inputs |= {f"{count}": few, f"{count}, close": few + 100}
        inputs[f"{count}, float32, close"] = (few + 100).float()
    return inputs


def everything_of(inputs):
    """Return all statistics of each tensor, and those of the channels of matrices."""
    found = {}
    for name, x in inputs.items():
        found[name] = compiled(x, has_reference=False, **EVERYTHING).run()[0]
        for axis in range(x.dim() if x.dim() > 1 else 0):
            op = compiled(x, has_reference=False, channels=axis)
            found[f"{name}, channels of axis {axis}"] = op.run()[0]
    return found


OF_A_FILE = """
import sys
import torch
from tests.ops.test_statistics import everything_of
torch.save(everything_of(torch.load(sys.argv[1])), sys.argv[2])
"""


def everything_under(target, inputs, results):
    """Compute the statistics of the tensors in a file in a process that has a target."""
    done = subprocess.run(
        [sys.executable, "-c", OF_A_FILE, inputs, results],
        cwd=ROOT,
        env={**os.environ, "POPSIM_CPU": target, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(results)


def places_of_other_bits(one, other):
    return (one.view(torch.int64) != other.view(torch.int64)).nonzero().flatten().tolist()


@pytest.mark.parametrize("target", build_info().usable_targets)
def test_all_processors_give_the_same_bits(target, tmp_path):
    """Of the same inputs: torch.randn gives other bits where POPSIM_CPU limits ATen."""
    if target == build_info().target:
        pytest.skip("this process has the target")
    inputs = inputs_of_all_kinds()
    torch.save(inputs, tmp_path / "inputs.pt")
    found = everything_under(target, tmp_path / "inputs.pt", tmp_path / "results.pt")
    expected = everything_of(inputs)
    places = {name: places_of_other_bits(found[name], expected[name]) for name in expected}
    assert {name: wrong for name, wrong in places.items() if wrong} == {}


@pytest.mark.parametrize(
    ("name", "value"), [("histogram", 4), ("histogram", -2), ("top", 65), ("samples", 4097)]
)
def test_what_cannot_be_asked(name, value):
    with pytest.raises(InternalError, match=name):
        compiled(sample(torch.float32, (9,)), **{name: value})
