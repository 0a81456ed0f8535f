"""What holds for the cost of every op, whatever its sizes."""

from math import isfinite

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from popsim_torch import _native
from tests.machine.one_cost import F16, F32, OneCost, cost_of, device_with, map_cost, parts_of
from tests.ops.op_samples import SAMPLES

# Those that take more cycles for a number of 16 bits than for one of 32, in the library's tables.
SLOWER_AS_HALF = {"div", "pow", "rsqrt", "reciprocal", "sqrt"}
FREE = {"within"}  # checks of values, which no IPU makes
SIZES = [0, 1, 2, 3, 7, 127, 1471, 1473, 99_991, 2**31, 2**31 + 1]
NAMES = [
    *("add", "mul", "exp", "tanh", "sigmoid", "sin", "erf", "relu", "neg", "max", "where", "lt"),
    *sorted(SLOWER_AS_HALF),
]
ARITY = {"add": 2, "mul": 2, "max": 2, "lt": 2, "div": 2, "pow": 2, "where": 3}
ON_ALL_TILES = 1472 * 64  # halves
sizes = st.integers(1, 2**31)
tiles = st.integers(1, 1472)


def unary(kind, attributes, dtype, shape, device=None):
    """Return the cost of an op whose result is like its operand."""
    program = OneCost()
    x, y = program.value(dtype, *shape), program.value(dtype, *shape)
    return program.cost(kind, [x], [y], attributes, device=device)


def instruction(name, dtype, count, device=None):
    whole = (dtype, (count,))
    arity = ARITY.get(name, 1)
    code = f"{name} {' '.join(map(str, range(arity)))}"
    return map_cost([code], [whole] * arity, whole, device=device)


def update(kind, states, dtype, count, device=None):
    program = OneCost()
    inputs = [program.variable(dtype, count) for _ in range(2 + states)]
    outputs = [inputs[0], *inputs[2:]]
    return program.cost(kind, inputs, outputs, {"parameters": 1}, device=device)


def random(dtype, count, device=None):
    program = OneCost()
    attributes = {"distribution": "normal", "shape": [count]}
    return program.cost("random", [], [program.value(dtype, count)], attributes, device=device)


def reduction(dtype, rows, count, device=None):
    program = OneCost()
    attributes = {"function": "sum", "axes": [1], "keepdim": False, "dtype": "float32"}
    x, y = program.value(dtype, rows, count), program.value(F32, rows)
    return program.cost("reduce", [x], [y], attributes, device=device)


def embedding(dtype, rows, width, indices, device=None):
    program = OneCost()
    table, where = program.variable(dtype, rows, width), program.value(torch.int32, indices)
    found = program.value(dtype, indices, width)
    return program.cost("embedding", [table, where], [found], device=device)


def product(dtype, m, k, n, device=None):
    program = OneCost()
    a, b, out = program.value(dtype, m, k), program.value(dtype, k, n), program.value(dtype, m, n)
    return program.cost("matmul", [a, b], [out], device=device)


def assert_sane(cost):
    for part in (cost.compute, cost.exchange, cost.sync, cost.glue, cost.cycles):
        assert isfinite(part)
        assert part >= 0
    assert cost.temporary_bytes >= 0
    assert cost.grade in ("A", "B", "C")
    assert cost.formula


@pytest.mark.parametrize(
    ("sample", "dtype"),
    [
        pytest.param(one, dtype, id=f"{one.kind}-{one.name}-{name}")
        for one in SAMPLES
        for dtype, name in ((F32, "float"), (F16, "half"))
        if dtype in one.dtypes
    ],
)
def test_ops_with_real_operands_cost_something_that_makes_sense(sample, dtype):
    graph = sample.compile(dtype).graph
    cost = cost_of(graph)
    if sample.kind == "custom":
        assert cost.grade == ""
        return
    assert_sane(cost)
    if sample.kind in FREE:
        assert (cost.formula, cost.cycles) == ("host", 0)
    else:
        assert cost.compute > 0
    assert parts_of(cost_of(graph)) == parts_of(cost)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", [F32, F16], ids=["float", "half"])
def test_odd_sizes(count, dtype):
    for name in NAMES:
        assert_sane(instruction(name, dtype, count))
    assert_sane(random(dtype, count))
    assert_sane(unary("copy", {}, dtype, (count,)))
    assert_sane(unary("cumsum", {"axis": 0}, dtype, (count,)))
    for axis, shape in ((0, (count,)), (1, (count, 1)), (1, (1, count)), (0, (count, 3))):
        softmax = {"axis": axis, "log": True, "dtype": "float32"}
        assert_sane(unary("softmax", softmax, dtype, shape))
    assert_sane(reduction(dtype, 1, count))
    assert_sane(reduction(dtype, count, 1))
    assert_sane(embedding(dtype, 10, 10, count))
    assert_sane(embedding(dtype, 10, count, 10))
    assert_sane(embedding(dtype, count, 10, 10))
    for kind, states in (("adam_update", 2), ("lamb_update", 2), ("sgd_momentum_update", 1)):
        assert_sane(update(kind, states, dtype, count))


@pytest.mark.parametrize("count", [0, 1, 3, 1473, 2**24 + 1])
def test_products_of_odd_sizes(count):
    for m, k, n in ((count, 5, 7), (5, count, 7), (5, 7, count)):
        assert_sane(product(F16, m, k, n))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from([F16, F32]), sizes, tiles, tiles)
def test_more_tiles_are_never_slower_for_elementwise_work(name, dtype, count, a, b):
    few, many = (device_with(number) for number in sorted((a, b)))
    assert (
        instruction(name, dtype, count, many).cycles <= instruction(name, dtype, count, few).cycles
    )
    assert random(dtype, count, many).cycles <= random(dtype, count, few).cycles
    adam = ("adam_update", 2, dtype, count)
    assert update(*adam, many).cycles <= update(*adam, few).cycles
    copied = ("copy", {}, dtype, (count,))
    assert unary(*copied, many).cycles <= unary(*copied, few).cycles


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 300), st.integers(1, 64), tiles)
def test_more_tiles_are_never_slower_for_products(m, k, n, a, b):
    few, many = (device_with(number) for number in sorted((a, b)))
    assert product(F16, m, k, n, many).cycles <= product(F16, m, k, n, few).cycles * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 100_000), st.integers(1, 2000), st.integers(1, 100_000), tiles, tiles)
def test_more_tiles_are_never_much_slower_for_lookups(rows, width, indices, a, b):
    """Only powers of two are tried as parts, so a plan may miss the best one by a little."""
    few, many = (device_with(number) for number in sorted((a, b)))
    at_most = 1.1 * embedding(F16, rows, width, indices, few).cycles
    assert embedding(F16, rows, width, indices, many).cycles <= at_most


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(NAMES), sizes, st.integers(1, 2000))
def test_half_is_never_slower_than_float(name, count, rows):
    if name not in SLOWER_AS_HALF:
        # Where each number takes as long: tensors are cut after whole words of 8 bytes, so a worker
        # may have one half more than floats; and small ones of half have fewer tiles.
        number = max(count, ON_ALL_TILES) if name == "where" else count
        slack = 6 * 5 if name == "where" else 0
        half, wide = instruction(name, F16, number), instruction(name, F32, number)
        assert half.cycles <= wide.cycles + slack
    assert random(F16, count).cycles <= random(F32, count).cycles
    half, wide = (reduction(dtype, rows, count) for dtype in (F16, F32))
    assert half.cycles <= wide.cycles
    for kind, states in (("adam_update", 2), ("sgd_momentum_update", 1), ("rmsprop_update", 1)):
        assert update(kind, states, F16, count).cycles <= update(kind, states, F32, count).cycles


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), st.sampled_from([F16, F32]), sizes)
def test_the_same_op_twice_costs_the_same(name, dtype, count):
    assert parts_of(instruction(name, dtype, count)) == parts_of(instruction(name, dtype, count))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(NAMES), sizes)
def test_the_clock_changes_no_cycles(name, count):
    fast = _native.MachineDevice(21)
    fast.clock *= 2
    assert parts_of(instruction(name, F32, count, fast)) == parts_of(instruction(name, F32, count))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 2000), st.integers(1, 2000), st.integers(1, 2000))
def test_a_smaller_share_of_memory_never_takes_more_of_it(m, k, n):
    program = OneCost()
    a, b, out = program.value(F16, m, k), program.value(F16, k, n), program.value(F16, m, n)
    program.cost("matmul", [a, b], [out])
    last = None
    for proportion in (0.02, 0.1, 0.3, 0.6):
        plan = _native.plan_matmul(_native.MachineDevice(21), m, k, n, proportion=proportion)
        assert last is None or last <= plan.temporary_bytes
        last = plan.temporary_bytes
