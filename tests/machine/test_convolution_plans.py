"""How convolutions are divided over the tiles."""

import math
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import popsim_torch as poptorch
from popsim_torch import _native
from tests.unit.executor.nets import Function

BOW = _native.MachineDevice(21)
SYNC = next(one.value for one in _native.machine_constants() if one.name == "sync")


def plan(batch, size, channels, kernel, *, half=True, device=BOW, **settings):
    return _native.plan_convolution(
        device,
        batch,
        size,
        *channels,
        kernel,
        half=half,
        half_partials=half,
        float_result=not half,
        **settings,
    )


def one_tile():
    device = _native.MachineDevice(21)
    device.tiles = 1
    return device


def test_the_cycles_of_one_tile():
    """The vertex for kernels of several elements, by hand: 12 rows of 8, 3 x 3, 32 to 16."""
    found = plan(1, (12, 8), (32, 16), (3, 3), device=one_tile(), proportion=2)
    assert found.turns == 1
    row = 3 + (34 + 4 * (8 - 3)) - 9
    worker = 18 + 2 * row  # two rows for each of six workers
    passes = 14 + 14 + 9 * (30 + 64 + 6 * worker)
    write = 6 * (6 + -(-(12 * 8 * 16 // 6) // 4))
    assert found.compute == 223 + 16 + 2 * (14 + passes) + write
    assert found.exchange == 0
    assert found.sync == SYNC
    assert found.cycles == found.compute + found.sync
    halo = 14 * 10 * 32 * 2
    assert found.temporary_bytes == halo + 9 * 32 * 16 * 2 + 12 * 8 * 16 * 2


def test_float_takes_twice_as_long_for_an_element():
    def compute(columns, half):
        sizes = (1, (12, columns), (16, 16), (3, 3))
        return plan(*sizes, half=half, device=one_tile(), proportion=2).compute

    for half, core in ((True, 4), (False, 8)):
        passes = 9 * (1 if half else 2)  # float has 8 input channels in a pass
        more = compute(40, half) - compute(20, half)
        write = 6 * 12 * 20 * 16 // 6 // (4 if half else 2)
        assert more == passes * 6 * 2 * 20 * core + write


def test_few_channels_have_kernel_columns_as_channels():
    few = plan(4, (112, 112), (3, 64), (7, 7))
    many = plan(4, (112, 112), (16, 64), (7, 7))
    assert few.cycles < 0.5 * many.cycles


def test_narrow_groups_share_passes():
    alone = plan(4, (56, 56), (4, 4), (3, 3), groups=32)
    packed = plan(4, (56, 56), (16, 16), (3, 3), groups=8)
    assert alone.cycles == packed.cycles


def test_strides_read_more():
    narrow, wide = (
        plan(1, (12, 8), (32, 16), (3, 3), stride=stride, device=one_tile(), proportion=2)
        for stride in ((1, 1), (2, 2))
    )
    assert wide.compute == narrow.compute
    more = (25 * 17 - 14 * 10) * 32 * 2  # with rims of two
    assert wide.temporary_bytes - narrow.temporary_bytes == more


def test_columns_are_cut_into_four_at_most():
    assert plan(1, (1, 4096), (16, 16), (1, 3)).columns <= 4


def test_a_large_plan_takes_little_time():
    taken = []
    for number in range(3):
        begin = time.process_time()
        plan(16, (56, 56), (512, 512), (3, 3), proportion=0.6 + number / 1000)
        taken.append(time.process_time() - begin)
    assert min(taken) < 0.2


def test_the_text_of_a_plan():
    found = plan(16, (56, 56), (64, 64), (3, 3))
    numbers = [found.batch, found.rows, found.columns, found.in_channels, found.out_channels]
    assert str(found).startswith(" x ".join(map(str, numbers)) + " tiles")


def test_empty_convolutions_cost_nothing():
    assert plan(0, (8, 8), (4, 4), (3, 3)).cycles == 0


# --- Properties ---------------------------------------------------------------------------------

SIZES = st.tuples(st.integers(1, 80), st.integers(1, 80))
CHANNELS = st.tuples(st.integers(1, 300), st.integers(1, 300))
KERNELS = st.tuples(st.integers(1, 5), st.integers(1, 5))
SHARES = st.floats(0.001, 1.5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 8), SIZES, CHANNELS, KERNELS, st.booleans(), SHARES, SHARES)
def test_a_lower_proportion_takes_no_more_memory(batch, size, channels, kernel, half, one, other):
    low, high = (
        plan(batch, size, channels, kernel, half=half, proportion=share)
        for share in sorted((one, other))
    )
    assert low.temporary_bytes <= high.temporary_bytes
    assert low.cycles >= high.cycles > 0
    for found in (low, high):
        used = found.batch * found.rows * found.columns * found.groups
        assert used * found.in_channels * found.out_channels <= BOW.tiles


# --- Ops ----------------------------------------------------------------------------------------


def cost_of(module, shape, kind="convolution"):
    x = torch.zeros(shape, dtype=torch.half)
    found = poptorch.estimate(module.half(), x)
    (op,) = [op for op in found.ops if op.kind == kind]
    return op


def test_a_convolution_of_single_elements_is_a_product():
    found = cost_of(nn.Conv2d(64, 128, 1, bias=False), (4, 64, 28, 28))
    options = {"half": True, "half_partials": False, "float_result": False}
    mk2 = _native.MachineDevice(2)
    wanted = _native.plan_matmul(mk2, 128, 64, 4 * 28 * 28, **options)
    assert found.plan == str(wanted)
    assert found.cycles - found.glue == pytest.approx(wanted.cycles)


def test_a_depthwise_convolution_uses_no_products():
    found = cost_of(nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False), (4, 64, 28, 28))
    each = math.ceil(4 * 64 * 28 * 28 / 1472)
    vectors = math.ceil(math.ceil(each / 6) / 4)
    assert found.compute == 6 * (30 + 2 * 9 * vectors)
    assert found.grade == "C"
    assert found.plan == ""


def test_gradients_of_convolutions_cost_more_than_the_forward_pass():
    net = nn.Sequential(nn.Conv2d(16, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1))
    model = Function(lambda x: poptorch.identity_loss(net(x), "mean"))
    model.net = net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = poptorch.estimate(model, torch.zeros(4, 16, 28, 28), optimizer=optimizer)
    by_kind = {}
    for op in found.ops:
        by_kind[op.kind] = by_kind.get(op.kind, 0) + op.cycles
    assert by_kind["convolution_grad_input"] < by_kind["convolution_grad_weight"]
    backward = by_kind["convolution_grad_input"] + by_kind["convolution_grad_weight"]
    assert backward > by_kind["convolution"]


def test_a_faster_clock_leaves_the_cycles_of_convolutions():
    def cycles(machine):
        options = poptorch.Options().machine(machine)
        x = torch.zeros(2, 16, 20, 20)
        found = poptorch.estimate(nn.Conv2d(16, 16, 3), x, options=options)
        return [op.cycles for op in found.ops]

    assert cycles("bow") == cycles("mk2")
