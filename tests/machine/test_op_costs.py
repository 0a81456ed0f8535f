"""Costs of single ops, by hand from the formulas that the machine model names."""

import re
from math import ceil, log2
from pathlib import Path

import pytest
import torch

from popsim_torch import _native
from popsim_torch.ir import TensorArgument
from tests.machine.one_cost import (
    F16,
    F32,
    GLUE,
    MILLION,
    OWN,
    SYNC,
    OneCost,
    map_cost,
    worker,
)

ROOT = Path(__file__).parents[2]
# Ops that run the user's own code, of which nothing is known.
NO_FORMULA = {"custom"}
VERTEX = 11
# Cycles and elements of a vector: of float32, of float16; the overhead, None if it is that of ops
# with two operands; the number of operands.
LOOPS = {
    "abs": (5, 1, 5, 1, 17, 1),
    "add": (3, 2, 3, 4, None, 2),
    "ceil": (6, 2, 6, 4, 17, 1),
    "clamp": (2, 2, 2, 4, 11, 3),
    "cos": (2304, 1, 25, 1, 17, 1),
    "div": (10, 2, 21, 4, None, 2),
    "eq": (14, 4, 9, 4, None, 2),
    "erf": (41, 1, 13, 1, 17, 1),
    "exp": (6, 2, 4, 4, 33, 1),
    "expm1": (8, 1, 9, 4, 17, 1),
    "floor": (6, 2, 6, 4, 17, 1),
    "ge": (14, 4, 9, 4, None, 2),
    "gt": (14, 4, 9, 4, None, 2),
    "le": (14, 4, 9, 4, None, 2),
    "log": (12, 2, 4, 4, 17, 1),
    "log1p": (22, 2, 22, 4, 17, 1),
    "lt": (14, 4, 9, 4, None, 2),
    "max": (3, 2, 4, 4, None, 2),
    "min": (3, 2, 4, 4, None, 2),
    "mul": (3, 2, 3, 4, None, 2),
    "ne": (14, 4, 9, 4, None, 2),
    "neg": (2, 2, 2, 4, 17, 1),
    "pow": (312, 1, 325, 1, None, 2),
    "reciprocal": (6, 2, 15, 4, 17, 1),
    "relu": (3, 2, 3, 4, 17, 1),
    "round": (6, 2, 6, 4, 17, 1),
    "rsqrt": (8, 2, 19, 4, 17, 1),
    "sigmoid": (12, 2, 6, 4, 17, 1),
    "sign": (9, 2, 9, 4, 17, 1),
    "sin": (2304, 1, 25, 1, 17, 1),
    "sqrt": (10, 2, 23, 4, 17, 1),
    "square": (2, 2, 2, 4, 17, 1),
    "sub": (3, 2, 3, 4, None, 2),
    "tanh": (12, 2, 4, 4, 17, 1),
    "where": (5, 1, 5, 1, 11, 3),
}
ADD = VERTEX + worker(29, 3, 2)
# The local pass of a reduction of a million float32, and its stages if there is one result: 1472
# partials in stages of 11, 12 and 12, of one result on a tile.
LOCAL = VERTEX + worker(60, 5, 2)
STAGES = 6 * (32 + 2 * 11 + 13) + 2 * 6 * (32 + 2 * 12 + 13)
STAGE_EXCHANGE = 10 / 11 + 2 * 11 / 12
BYTES = 680 * 4  # of a million float32, on a tile


def names_in(path: str, pattern: str) -> set[str]:
    return set(re.findall(pattern, (ROOT / "csrc" / path).read_text()))


# --- The tables are complete ------------------------------------------------


@pytest.mark.parametrize("op", _native.op_table(), ids=lambda op: op.name)
def test_every_kind_of_op_has_a_formula_or_is_known_to_have_none(op):
    assert _native.has_cost_rule(op.name) != (op.name in NO_FORMULA)


def test_an_op_without_a_formula_says_so():
    program = OneCost()
    x = program.value(F32, 10)
    cost = program.cost("custom", [x], [program.value(F32, 10)])
    assert (cost.cycles, cost.grade, cost.formula) == (0, "", "")
    assert not _native.has_cost_rule("no such op")


def test_every_instruction_has_a_loop_and_every_loop_an_instruction():
    instructions = names_in("ops/map/instructions.cpp", r'\bentry\(\s*"(\w+)"')
    rows = names_in("machine/formulas/elementwise.cpp", r'Row\{"(\w+)"')
    assert len(instructions) > 40
    assert instructions == rows


# --- Elementwise ------------------------------------------------------------


def test_the_published_example():
    """Half add of a million elements: 680 on a tile, 114 of a worker, 29 vectors."""
    cost = map_cost(["add 0 1"], [(F16, (MILLION,))] * 2, (F16, (MILLION,)))
    assert (cost.compute, cost.sync, cost.glue) == (689, SYNC, GLUE)
    assert (cost.exchange, cost.grade, cost.formula) == (0, "A", "elementwise")
    assert cost.cycles == 689 + SYNC + GLUE


@pytest.mark.parametrize("dtype", [F32, F16], ids=["float", "half"])
@pytest.mark.parametrize("name", LOOPS)
def test_instructions(name, dtype):
    wide, wide_count, half, half_count, overhead, arity = LOOPS[name]
    cycles, count = (half, half_count) if dtype is F16 else (wide, wide_count)
    binary = 26 if dtype is F16 else 29
    expected = VERTEX + worker(binary if overhead is None else overhead, cycles, count)
    operands = " ".join(map(str, range(arity)))
    cost = map_cost([f"{name} {operands}"], [(dtype, (MILLION,))] * arity, (dtype, (MILLION,)))
    assert cost.compute == expected + (9 if arity == 1 else 0)
    assert cost.grade == "A"
    assert cost.exchange == 0


@pytest.mark.parametrize(("dtype", "overhead"), [(F32, 29), (F16, 26)])
def test_comparisons_cost_as_their_operands_say_not_as_their_truth_values(dtype, overhead):
    cost = map_cost(["lt 0 1"], [(dtype, (MILLION,))] * 2, (torch.bool, (MILLION,)))
    assert cost.compute == VERTEX + worker(overhead, 9 if dtype is F16 else 14, 4)


def test_truth_values():
    cost = map_cost(["and 0 1"], [(torch.bool, (MILLION,))] * 2, (torch.bool, (MILLION,)))
    assert cost.compute == VERTEX + worker(26, 5, 4)


@pytest.mark.parametrize(("dtype", "count"), [(F32, 2), (F16, 4)])
@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_an_operand_that_is_a_number_is_faster(name, dtype, count):
    expected = VERTEX + worker(20, 2, count)
    whole = (dtype, (MILLION,))
    assert map_cost([f"{name} 0 1"], [whole], whole, constants=[2.0]).compute == expected
    assert map_cost([f"{name} 0 1"], [whole, (dtype, ())], whole).compute == expected


def test_a_chain_pays_loads_and_the_overhead_once():
    whole = (F32, (MILLION,))
    cost = map_cost(["exp 0", "add 1 2", "tanh 3"], [whole] * 2, whole)
    # 6 + 3 + 12 cycles, two loads and stores less.
    assert cost.compute == VERTEX + worker(33, 6 + 3 + 12 - 4, 2)
    assert cost.sync == SYNC
    assert cost.grade == "C"


def test_rows_of_an_operand_are_sent_to_the_tiles_that_need_them():
    cost = map_cost(["add 0 1"], [(F32, (1000, 1000)), (F32, (500,))], (F32, (1000, 1000)))
    assert cost.compute == VERTEX + worker(29 + 12, 3, 2)
    assert cost.exchange == 500  # 4 bytes each, 4 bytes a cycle
    assert cost.sync == 2 * SYNC
    assert cost.grade == "C"


def test_a_view_that_repeats_elements_is_an_operand_that_is_broadcast():
    program = OneCost()
    row = program.value(F32, 500)
    repeated = program.graph.add_view(row, (2000, 500), (0, 1), 0)
    out = program.value(F32, 2000, 500)
    attributes = {
        "code": ["mul 0 1"],
        "constants": [2.0],
        "results": [2],
        "dtypes": ["float32"],
        "shape": [2000, 500],
    }
    cost = program.cost("map", [repeated], [out], attributes)
    # All tiles work on the result, not those alone that have the row.
    assert cost.compute == VERTEX + worker(20 + 12, 2, 2)
    assert cost.exchange == 500


def test_a_part_of_a_tensor_costs_as_its_own_elements():
    program = OneCost()
    whole = program.value(F32, 1472, 3000)
    part = program.graph.add_view(whole, (1472, 1000), (3000, 1), 0)
    out = program.value(F32, 1472, 1000)
    attributes = {
        "code": ["exp 0"],
        "constants": [],
        "results": [1],
        "dtypes": ["float32"],
        "shape": [1472, 1000],
    }
    cost = program.cost("map", [part], [out], attributes)
    assert cost.compute == VERTEX + 9 + worker(33, 6, 2, own=ceil(1000 / 6))


def test_small_tensors_have_at_least_128_bytes_of_a_tile():
    cost = map_cost(["add 0 1"], [(F32, (100,))] * 2, (F32, (100,)))
    # 4 tiles of 26 elements, whole vectors of 2: 5 of a worker.
    assert cost.compute == VERTEX + worker(29, 3, 2, own=5)


# --- Casts, fills, random numbers -------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "cycles"),
    [
        (F16, F32, 0.5),
        (F32, F16, 0.5),
        (torch.int32, F32, 2),
        (F32, torch.int32, 2),
    ],
)
def test_casts(source, target, cycles):
    program = OneCost()
    x, y = program.value(source, MILLION), program.value(target, MILLION)
    cost = program.cost("copy", [x], [y], {"dtype": str(target).removeprefix("torch.")})
    assert cost.compute == 12 + 6 * (37 + OWN * cycles)
    assert (cost.sync, cost.exchange, cost.grade) == (SYNC, 0, "A")


@pytest.mark.parametrize(("dtype", "expected"), [(F16, 26 + OWN / 4), (F32, 23 + OWN / 2)])
def test_fills(dtype, expected):
    program = OneCost()
    out = program.value(dtype, MILLION)
    attributes = {"operator": "aten::zeros", "overload": "", "arguments": []}
    cost = program.cost("aten", [], [out], attributes)
    assert cost.compute == 6 * expected
    assert cost.grade == "C"  # that this operator is a fill is taken from its name


@pytest.mark.parametrize(
    ("distribution", "cycles"), [("uniform", 4), ("normal", 4), ("bernoulli", 1)]
)
@pytest.mark.parametrize(("dtype", "count"), [(F32, 2), (F16, 4)])
def test_random_numbers(distribution, cycles, dtype, count):
    program = OneCost()
    attributes = {"distribution": distribution, "shape": [MILLION]}
    cost = program.cost("random", [], [program.value(dtype, MILLION)], attributes)
    assert cost.compute == worker(24, cycles, count)
    assert (cost.sync, cost.grade) == (SYNC, "A")


# --- Reductions and what consists of them ------------------------------------


def test_a_reduction_to_one_number_adds_up_the_tiles_in_three_stages():
    program = OneCost()
    attributes = {"function": "sum", "axes": [0], "keepdim": False, "dtype": "float32"}
    cost = program.cost("reduce", [program.value(F32, MILLION)], [program.value(F32)], attributes)
    assert cost.compute == LOCAL + STAGES
    assert cost.exchange == pytest.approx(BYTES / 4 + STAGE_EXCHANGE)
    assert cost.sync == 8 * SYNC
    assert cost.grade == "B"


def test_a_reduction_of_rows_stays_on_their_tiles():
    program = OneCost()
    attributes = {"function": "sum", "axes": [1], "keepdim": False, "dtype": "float32"}
    cost = program.cost(
        "reduce", [program.value(F32, 1000, 1000)], [program.value(F32, 1000)], attributes
    )
    assert (cost.compute, cost.exchange, cost.sync) == (LOCAL, BYTES / 4, 2 * SYNC)


def square(program: OneCost, dtype: torch.dtype = F32):
    return program.value(dtype, 1000, 1000)


@pytest.mark.parametrize("is_log", [False, True])
def test_softmax(is_log):
    program = OneCost()
    attributes = {"axis": 1, "log": is_log, "dtype": "float32"}
    cost = program.cost("softmax", [square(program)], [square(program)], attributes)
    exponentials = VERTEX + 9 + worker(33, 6, 2)
    expected = 2 * LOCAL + 2 * ADD + exponentials
    if is_log:
        expected += ADD + VERTEX + worker(29, 12, 2, own=1)
    assert cost.compute == expected
    assert cost.exchange == 2 * BYTES / 4


def test_the_gradient_of_softmax():
    program = OneCost()
    attributes = {"axis": 1, "log": False, "dtype": "float32"}
    y = [square(program), square(program)]
    cost = program.cost("softmax_grad", y, [square(program)], attributes)
    assert cost.compute == LOCAL + 3 * ADD


@pytest.mark.parametrize("kind", ["layer_norm", "group_norm"])
def test_norms(kind):
    program = OneCost()
    affine = [program.variable(F32, 1000)] * 2
    attributes = {"axes": 1} if kind == "layer_norm" else {"groups": 1}
    cost = program.cost(kind, [square(program), *affine], [square(program)], attributes)
    on_rows = VERTEX + worker(29, 20, 2, own=1)
    assert cost.compute == 2 * LOCAL + 3 * ADD + 4 * on_rows
    again = OneCost()
    statistics = [again.value(F32, 1000, 1)] * 2
    inputs = [square(again), square(again), *statistics, again.variable(F32, 1000)]
    cost = again.cost(f"{kind}_grad", inputs, [square(again)], attributes)
    assert cost.compute == 4 * LOCAL + 5 * ADD + 4 * on_rows


def test_batch_norm_pays_for_statistics_and_its_other_passes_are_ops_of_their_own():
    program = OneCost()
    x = program.value(F32, 10, 2000, 50)
    state = [program.variable(F32, 2000) for _ in range(3)]
    cost = program.cost("batch_norm_statistics", [x, *state], [program.value(F32, 2000)])
    assert cost.compute == 2 * LOCAL


def test_cumulative_sums_are_two_passes():
    program = OneCost()
    cost = program.cost("cumsum", [square(program)], [square(program)], {"axis": 1})
    assert (cost.compute, cost.grade) == (2 * ADD, "C")


def test_sorts():
    program = OneCost()
    attributes = {"operator": "aten::sort", "overload": "", "arguments": []}
    cost = program.cost("aten", [square(program)], [square(program)], attributes)
    assert cost.compute == pytest.approx(6 * OWN * log2(1000) * 20)
    assert cost.grade == "C"


@pytest.mark.parametrize(("operator", "times"), [("aten::argmax", 3), ("aten::amax", 1)])
def test_an_arg_max_is_three_reductions(operator, times):
    program = OneCost()
    attributes = {"operator": operator, "overload": "", "arguments": []}
    cost = program.cost("aten", [square(program)], [program.value(F32, 1000)], attributes)
    assert cost.compute == times * LOCAL


# Twice 680 numbers on the fullest tile.
COMPLEX_ADD = VERTEX + worker(29, 3, 2, own=ceil(2 * 680 / 6))


def complex_call(name, *inputs, arguments=()):
    program = OneCost()
    attributes = {"operator": f"aten::{name}", "overload": "", "arguments": list(arguments)}
    tensors = [program.value(torch.complex64, *shape) for shape in inputs]
    out = program.value(torch.complex64, 1000, 1000)
    return program.cost("aten", tensors, [out], attributes)


def test_complex_numbers_are_twice_as_many_real_ones():
    cost = complex_call("exp", (1000, 1000))
    assert (cost.compute, cost.grade) == (COMPLEX_ADD, "C")


@pytest.mark.parametrize(("axes", "length"), [([1], 1000), ([-2, -1], MILLION)])
def test_fourier_transforms_are_log2_passes(axes, length):
    cost = complex_call("_fft_c2c", (1000, 1000), arguments=[TensorArgument(0), axes, 0, True])
    assert cost.compute == pytest.approx(log2(length) * COMPLEX_ADD)
    assert cost.exchange > 0
    assert cost.grade == "C"


@pytest.mark.parametrize("name", ["mm", "addmm"])
def test_a_complex_product_is_a_real_one_of_four_times_the_work(name):
    program = OneCost()
    a, b = program.value(F32, 1000, 2000), program.value(F32, 2000, 2000)
    real = program.cost("matmul", [a, b, None, None], [program.value(F32, 1000, 2000)], {})
    added = [(1000, 1000)] * (name == "addmm")
    cost = complex_call(name, *added, (1000, 1000), (1000, 1000))
    assert (cost.compute, cost.exchange, cost.sync) == (real.compute, real.exchange, real.sync)
    assert cost.grade == "C"


# --- Copies, slices, pools ----------------------------------------------------


def test_a_plain_copy_moves_8_bytes_a_cycle():
    program = OneCost()
    cost = program.cost("copy", [square(program)], [square(program)])
    each = ceil(4 * MILLION / 1472)
    assert (cost.compute, cost.exchange, cost.sync) == (VERTEX + each / 8, 0, SYNC)


@pytest.mark.parametrize(("dtype", "size"), [(F32, 4), (F16, 2)])
def test_a_transpose_is_an_exchange_and_a_copy_by_elements(dtype, size):
    program = OneCost()
    view = program.graph.add_view(square(program, dtype), (1000, 1000), (1, 1000), 0)
    cost = program.cost("copy", [view], [square(program, dtype)])
    each = ceil(MILLION * size / 1472)
    assert cost.exchange == each / 4
    assert cost.compute == each * 5 / (4 * size)
    assert cost.sync == 2 * SYNC


@pytest.mark.parametrize(
    ("dtype", "last", "per_kib"), [(F16, 4, 451), (F16, 2, 3200), (F16, 1, 5271), (F32, 1, 3200)]
)
def test_a_permutation_costs_by_the_pieces_that_it_moves(dtype, last, per_kib):
    program = OneCost()
    x = program.value(dtype, 100, 50, 200, last)
    size = dtype.itemsize
    shape, strides = (200, 50, 100, last), (last, 200 * last, 50 * 200 * last, 1)
    view = program.graph.add_view(x, shape, strides, 0)
    cost = program.cost("copy", [view], [program.value(dtype, *shape)])
    each = ceil(MILLION * last * size / 1472)
    assert cost.compute == pytest.approx(587 + each / 1024 * per_kib)
    assert cost.exchange == each / 4
    assert cost.sync == 2 * SYNC


def test_a_copy_of_a_part_copies_the_part_alone():
    program = OneCost()
    part = program.graph.add_view(program.value(F32, 1472, 3000), (1472, 1000), (3000, 1), 1000)
    cost = program.cost("copy", [part], [program.value(F32, 1472, 1000)])
    assert (cost.compute, cost.exchange) == (VERTEX + 4000 / 8, 0)


def test_a_copy_of_a_view_that_repeats_elements_sends_the_distinct_ones():
    program = OneCost()
    view = program.graph.add_view(program.value(F32, 500), (1472, 1000, 500), (0, 0, 1), 0)
    cost = program.cost("copy", [view], [program.value(F32, 1472, 1000, 500)])
    assert cost.compute == VERTEX + 1000 * 500 * 4 / 8
    assert cost.exchange == 500


def test_dynamic_slices():
    program = OneCost()
    x, start = program.value(F32, 300, 1472 * 8), program.value(torch.int32)
    part = program.value(F32, 100, 1472 * 8)
    expected = 25 + 6 * (39 + 17 * (24 + 2 * 4))  # 17 rows of a worker, of 32 bytes
    cost = program.cost("dynamic_slice", [x, start], [part], {"axis": 0, "count": 100})
    assert cost.compute == expected
    cost = program.cost("dynamic_update", [x, part, start], [x], {"axis": 0})
    assert cost.compute == expected


def window(**more):
    both = {"kernel": [2, 2], "stride": [2, 2], "padding": [0, 0], "dilation": [1, 1]}
    return {**both, "ceil": False, **more}


@pytest.mark.parametrize("kind", ["max_pool", "average_pool"])
def test_pools(kind):
    program = OneCost()
    x, y = program.value(F16, 1472, 4, 12, 16), program.value(F16, 1472, 4, 6, 8)
    # 192 results of a tile, 32 of a worker: 4 rows, 8 vectors of 4 positions.
    cost = program.cost(kind, [x], [y], window())
    assert cost.compute == 6 * (25 * 4 + 3 * 4 * 8)
    assert cost.exchange == 192 * 4 * 2 / 4
    # Its gradient: 128 results of a worker, in 8 rows, each in one window.
    cost = program.cost(f"{kind}_grad", [y], [x], window(input_shape=list(x.shape)))
    assert cost.compute == 6 * (25 * 8 + (5 if kind == "max_pool" else 3) * 32)


def test_adaptive_pools_cover_their_input():
    program = OneCost()
    x, y = program.value(F16, 1472, 4, 12, 16), program.value(F16, 1472, 4, 6, 8)
    cost = program.cost("average_pool", [x], [y], {"output_size": [6, 8]})
    assert cost.compute == 6 * (25 * 4 + 3 * 4 * 8)


# --- Lookups --------------------------------------------------------------------


def lookup_price(rows, width, indices, size, pd, pe, pl, *, update):
    """Return the cycles of a plan, written anew from the formulas."""
    own, part = ceil(indices / pl), ceil(width / pe)
    row = 12 + 3 * part * size // 4 if update else 19 + 2 * ceil(part / (8 // size))

    def tile(found, all_):
        return 6 * (30 + ceil(found / 6) * row + ceil((all_ - found) / 6) * 8)

    found = ceil(own / pd)
    cycles = tile(found, own) + own + 2 * SYNC
    if pd > 1:
        cycles += 2 * SYNC
        if update:
            cycles += own * part * size / 4
        else:
            cycles += pd * indices * width * size / 1472 / 4 + tile(found, found)
    return cycles


@pytest.mark.parametrize("update", [False, True])
@pytest.mark.parametrize(
    ("rows", "width", "indices", "dtype"),
    [(100, 64, 1, F16), (30_522, 768, 4096, F16), (50_000, 128, 20_000, F32), (7, 3, 9, F32)],
)
def test_lookups_take_the_cheapest_plan(rows, width, indices, dtype, update):
    program = OneCost()
    where = program.value(torch.int32, indices)
    table = program.variable(dtype, rows, width)
    found = program.value(dtype, indices, width)
    size = dtype.itemsize
    prices = []
    for pe in (2**i for i in range(11)):
        for pd in (2**i for i in range(11)):
            if pe * pd <= 1472 and pe <= ceil(width * size / 8) and pd <= rows:
                pl = min(1472 // pe // pd, indices)
                prices.append(lookup_price(rows, width, indices, size, pd, pe, pl, update=update))
    if not update:
        cost = program.cost("embedding", [table, where], [found])
        assert cost.cycles == pytest.approx(min(prices) + GLUE)
        return
    gradient = program.value(dtype, rows, width)
    attributes = {"rows": rows, "padding_index": -1}
    cost = program.cost("embedding_grad", [found, where], [gradient], attributes)
    # The gradient is filled with zeros, on as many tiles as its plan has.
    least = 6 * (26 if dtype is F16 else 23) + SYNC
    filled = cost.cycles - min(prices) - GLUE
    assert least < filled <= least + ceil(rows * width / 2)


# --- Updates ----------------------------------------------------------------------

AXPY = VERTEX + worker(30, 3, 2)
REDUCTION = LOCAL + STAGES


def update_cost(kind, states, *, weight=F32, gradient=F32, state=F32, count=1, move=False):
    program = OneCost()
    inputs = []
    for _ in range(count):
        inputs.append(program.variable(weight, MILLION))
        make = program.value if move else program.variable
        inputs.append(make(gradient, MILLION))
        inputs += [program.variable(state, MILLION) for _ in range(states)]
        inputs += [program.variable(F32) for _ in range(4)]
    attributes = {} if kind == "sgd_update" else {"parameters": count}
    outputs = [tensor for tensor in inputs if tensor.shape]
    return program.cost(kind, inputs, outputs, attributes)


UPDATES = [
    ("sgd_update", 0, AXPY, "A"),
    ("sgd_combined_update", 1, 2 * AXPY, "A"),
    ("sgd_momentum_update", 1, 3 * AXPY, "A"),
    ("adam_update", 2, VERTEX + worker(30, 40, 2), "C"),
    ("rmsprop_update", 1, VERTEX + worker(30, 30, 2), "C"),
    ("lamb_update", 2, VERTEX + worker(30, 40, 2) + 2 * REDUCTION + 2 * AXPY, "C"),
]
# `sgd_update` has one weight; the others may have several.
COUNTED = [
    (*one, count) for one in UPDATES for count in (1, 3) if (one[0], count) != (UPDATES[0][0], 3)
]


@pytest.mark.parametrize(("kind", "states", "expected", "grade", "count"), COUNTED)
def test_updates(kind, states, expected, grade, count):
    cost = update_cost(kind, states, count=count)
    assert cost.compute == pytest.approx(count * expected)
    assert (cost.grade, cost.glue, cost.formula) == (grade, 0, "update")


def test_states_of_32_bits_set_the_pace_of_weights_of_16():
    wide = VERTEX + worker(30, 40, 2)
    narrow = VERTEX + worker(30, 40, 4)
    assert update_cost("adam_update", 2, weight=F16, gradient=F16, state=F32).compute == wide
    assert update_cost("adam_update", 2, weight=F16, gradient=F16, state=F16).compute == narrow


def test_a_gradient_that_was_not_accumulated_is_moved_to_its_weight():
    moved = update_cost("sgd_update", 0, gradient=F16, move=True)
    assert moved.exchange == ceil(2 * MILLION / 1472) / 4
    assert moved.sync == 2 * SYNC
    kept = update_cost("sgd_update", 0, gradient=F16)
    assert (kept.exchange, kept.sync) == (0, SYNC)


@pytest.mark.parametrize("kind", ["accumulate", "sgd_combined_accumulate"])
@pytest.mark.parametrize(
    ("gradient", "accumulator", "expected"),
    [
        (F32, F32, worker(30, 3, 2)),
        (F16, F16, worker(30, 3, 4)),
        (F16, F32, worker(30, 5, 4)),
    ],
)
def test_accumulation_is_one_pass(kind, gradient, accumulator, expected):
    program = OneCost()
    inputs = [program.value(gradient, MILLION), program.variable(accumulator, MILLION)]
    if kind == "sgd_combined_accumulate":
        inputs.append(program.variable(F32))
    attributes = {"running": False} if kind == "accumulate" else {}
    cost = program.cost(kind, inputs, [inputs[1]], attributes)
    assert cost.compute == VERTEX + expected
    assert (cost.formula, cost.glue, cost.grade) == ("accumulation", GLUE, "A")


# --- Products ------------------------------------------------------------------


def test_a_layer_that_is_run_step_by_step_is_a_product_and_gates_each():
    program = OneCost()
    x = program.value(F32, 20, 48, 60)
    state = [program.value(F32, 48, 72)] * 2
    weights = [program.variable(F32, 288, 60), program.variable(F32, 288, 72)]
    attributes = {"mode": "lstm", "reverse": False}
    y = program.value(F32, 20, 48, 72)
    cost = program.cost("recurrent", [x, *state, *weights, None, None], [y], attributes)
    plan = _native.plan_matmul(
        _native.MachineDevice(21), 48, 132, 288, half=False, half_partials=False, float_result=True
    )
    own = ceil(ceil(48 * 288 / 1472) / 6)
    gates = VERTEX + 9 + worker(17, 12, 2, own=own) + 2 * (VERTEX + worker(29, 3, 2, own=own))
    assert cost.cycles == pytest.approx(20 * (plan.cycles + gates + 3 * SYNC) + GLUE)


# --- Gradients as a whole, observation, what is not of the tiles --------------------


@pytest.mark.parametrize("kind", ["gradient_norm", "finite"])
def test_norms_of_gradients_reduce_each_of_them(kind):
    program = OneCost()
    gradients = [program.variable(F32, MILLION) for _ in range(3)]
    scale = program.variable(F32)
    cost = program.cost(kind, [*gradients, scale], [program.value(F32)])
    assert cost.compute == 3 * REDUCTION
    assert (cost.glue, cost.grade, cost.formula) == (GLUE, "B", "reduction")


@pytest.mark.parametrize(
    ("asked", "reductions", "passes"),
    [
        ({}, 0, 0),
        ({"moments": True}, 3, 0),
        ({"counts": True}, 1, 1),
        ({"histogram": 0}, 1, 4),
        ({"top": 5}, 8, 0),
        ({"fingerprint": True}, 1, 1),
    ],
)
def test_statistics_cost_by_what_is_asked_for(asked, reductions, passes):
    program = OneCost()
    none = {"moments": False, "counts": False, "histogram": -1, "top": 0, "samples": 0}
    attributes = {**none, "fingerprint": False, "channels": -1, **asked}
    x = program.value(F32, MILLION)
    cost = program.cost("statistics", [x], [program.value(F32, 10)], attributes)
    assert cost.compute == reductions * REDUCTION + passes * ADD
    assert (cost.grade, cost.formula) == ("C", "statistics")


@pytest.mark.parametrize(
    ("kind", "formula", "grade", "glue"),
    [
        *((kind, "host", "A", 0) for kind in ("anchor", "enqueue", "host_call", "position")),
        ("print", "host", "A", 0),
        *((kind, "control", "C", GLUE) for kind in ("branch", "loop", "repeat_while")),
        ("yield", "control", "A", 0),
        ("all_reduce", "all-reduce", "B", 0),
    ],
)
def test_the_host_the_links_and_bodies_are_counted_elsewhere(kind, formula, grade, glue):
    program = OneCost()
    x = program.value(F32, MILLION)
    cost = program.cost(kind, [x], [program.value(F32, MILLION)])
    assert (cost.compute, cost.exchange, cost.sync) == (0, 0, 0)
    assert (cost.glue, cost.formula, cost.grade) == (glue, formula, grade)


@pytest.mark.parametrize("name", ["relu", "no_such_operator"])
def test_an_operator_without_a_name_that_is_known_is_a_pass(name):
    program = OneCost()
    x = program.value(F32, MILLION)
    attributes = {"operator": f"aten::{name}", "overload": "", "arguments": []}
    cost = program.cost("aten", [x], [program.value(F32, MILLION)], attributes)
    assert (cost.compute, cost.grade, cost.formula) == (ADD, "C", "ATen operator")
