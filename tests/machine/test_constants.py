"""The table of the machine model's constants."""

import re
from pathlib import Path

import pytest

from popsim_torch import _native
from popsim_torch.errors import Error

ROOT = Path(__file__).parents[2]
HEADER = ROOT / "csrc" / "machine" / "constants.h"
# What validation may move, and between which values: as the specification says, or None.
TUNABLE = {
    "sync": (150, 240),
    "glue": (300, 600),
    "backward convolution": (1.0, 1.35),
    "all-reduce, up to 64 IPUs": None,
    "all-reduce, more IPUs": None,
    "control code": None,
    "code of an op with an exchange": None,
    "code of another op": None,
}
CONSTANTS = _native.machine_constants()


def test_the_table_has_every_constant_of_the_header():
    declared = re.findall(r"inline constexpr Constant (k\w+)", HEADER.read_text())
    (listed,) = re.findall(r"kAll = \{(.*?)\}", HEADER.read_text(), re.DOTALL)
    assert declared == re.findall(r"k\w+", listed)
    assert len(CONSTANTS) == len(declared) > 20


def test_names_are_unique():
    names = [one.name for one in CONSTANTS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("one", CONSTANTS, ids=lambda one: one.name)
def test_a_constant_says_what_it_is_and_where_it_comes_from(one):
    assert one.unit
    assert len(one.source) > 10
    assert one.grade in ("A", "B", "C")
    assert one.value > 0


@pytest.mark.parametrize("one", CONSTANTS, ids=lambda one: one.name)
def test_values_are_within_their_ranges(one):
    assert one.least <= one.value <= one.most


def test_only_the_constants_that_the_specification_names_may_be_tuned():
    assert {one.name for one in CONSTANTS if one.least < one.most} == set(TUNABLE)


@pytest.mark.parametrize(
    "one", [one for one in CONSTANTS if one.name in TUNABLE], ids=lambda one: one.name
)
def test_ranges_are_those_of_the_specification(one):
    given = TUNABLE[one.name]
    assert given is None or (one.least, one.most) == given


@pytest.mark.parametrize("one", CONSTANTS, ids=lambda one: one.name)
def test_no_published_number_may_be_tuned(one):
    assert one.grade != "A" or one.least == one.most


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("start of a vertex", 11),
        ("external sync", 600),
        ("hop of a sync", 15e-9),
        ("links of a pair", 4 * 16e9 * 0.85),
        ("links between pairs", 2 * 16e9 * 0.85),
        ("memory beside the IPUs", 38.4e9),
        ("host, data waiting", 8e9),
        ("host, 4 IPUs together", 11e9),
        ("host, data staged first", 2.1e9),
        ("stream copy", 1500),
        ("blocking call, before", 80_000),
        ("blocking call, after", 83_000),
        ("random state of a worker", 16),
    ],
)
def test_fixed_numbers_are_those_of_the_specification(name, value):
    (one,) = [one for one in CONSTANTS if one.name == name]
    assert one.value == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("version", "tiles", "tile_bytes", "clock"),
    [(1, 1216, 262_144, 1.6e9), (2, 1472, 638_976, 1.33e9), (21, 1472, 638_976, 1.85e9)],
)
def test_devices_are_those_of_the_specification(version, tiles, tile_bytes, clock):
    device = _native.MachineDevice(version)
    assert (device.tiles, device.tile_bytes, device.clock) == (tiles, tile_bytes, clock)
    assert device.links == 10
    assert device.shares_bus


@pytest.mark.parametrize("version", [0, 3, 20, -1])
def test_there_are_no_other_devices(version):
    text = f"there is no IPU of version {version}: use 1, 2 or 21"
    with pytest.raises(Error, match=text), _native.translated_errors():
        _native.MachineDevice(version)
