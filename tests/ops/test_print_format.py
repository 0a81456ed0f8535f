"""The text that the print op writes to stderr."""

import math

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.errors import InternalError
from popsim_torch.passes.native_graph import to_native

DEFAULTS = {
    "title": "t",
    "summarise_threshold": 1000,
    "edge_items": 3,
    "max_line_width": 80,
    "digits": 4,
    "float_format": "auto",
    "separator": ", ",
    "open_bracket": "(",
    "close_bracket": ")",
}


@pytest.fixture
def printed(capfd):
    """A function that prints a tensor on the device and returns the text."""

    def print_on_device(value: torch.Tensor, micro_batches: int = 1, **options) -> str:
        graph = ir.Graph()
        count = value.untyped_storage().nbytes() // value.element_size()
        base = graph.add_tensor(ir.TensorKind.VARIABLE, value.dtype, (count,))
        source = graph.add_view(base, value.shape, value.stride(), value.storage_offset())
        out = graph.add_view(source, value.shape, value.stride(), value.storage_offset())
        attributes = DEFAULTS | options
        graph.add_op("print", [source], [out], attributes, phase=ir.Phase.FORWARD)
        config = _native.RunConfig(micro_batches, 1, False, "sequential")
        with _native.translated_errors():
            executable = _native.Executable(to_native(graph), config)
            executable.write(base.id, value.as_strided((count,), (1,), 0))
            executable.load()
            capfd.readouterr()
            executable.run([])
        return capfd.readouterr().err

    return print_on_device


def ints(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_scalar(printed):
    assert printed(torch.tensor(1.5)) == "t: 1.500\n"


def test_rank_1(printed):
    assert printed(torch.tensor([1.5, -2.25, 30.0])) == "t: ( 1.50,-2.25,30.00)\n"


def test_rank_2(printed):
    value = torch.tensor([[1.5, 2.5], [3.5, 4.5]])
    assert printed(value, digits=2) == "t: (\n (1.5,2.5)\n (3.5,4.5)\n)\n"


def test_rank_3(printed):
    expected = "t: (\n (\n  (0,1)\n  (2,3)\n )\n (\n  (4,5)\n  (6,7)\n )\n)\n"
    assert printed(torch.arange(8).view(2, 2, 2)) == expected


def test_no_title(printed):
    assert printed(ints(1, 2), title="") == "(1,2)\n"


def test_once_per_micro_batch(printed):
    assert printed(ints(1), micro_batches=3) == "t: (1)\n" * 3


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.tensor([True, False]), "(1,0)"),
        (torch.tensor([3, 200], dtype=torch.uint8), "(  3,200)"),
        (torch.tensor([-3, 100], dtype=torch.int8), "( -3,100)"),
        (torch.tensor([-3, 1000], dtype=torch.int16), "(  -3,1000)"),
        (torch.tensor([6, 9, 12], dtype=torch.int32), "( 6, 9,12)"),
        (torch.tensor([2**60 + 1, -1]), "(1152921504606846977,                 -1)"),
        (torch.tensor([0.5, 0.25]).half(), "(0.500,0.250)"),
        (torch.tensor([0.5, 0.25]).bfloat16(), "(0.500,0.250)"),
        (torch.tensor([0.5, 0.25], dtype=torch.float64), "(0.500,0.250)"),
    ],
)
def test_element_types(printed, value, expected):
    assert printed(value) == f"t: {expected}\n"


@pytest.mark.parametrize(
    ("value", "options", "expected"),
    [
        ([1.5 - 2j, 10 + 0.5j], {}, "(1.50-2.000j,10.00+0.500j)"),
        ([complex(math.nan, -math.inf), 1], {}, "(    nan-infj,1.000+0.000j)"),
        ([1.5 - 2j, 0.25j], {"float_format": "none"}, "(1.5-2j,0+0.25j)"),
        ([-0.0 - 1e-9j], {}, "(-0.000-1.000e-09j)"),
    ],
)
def test_complex_numbers(printed, value, options, expected):
    found = printed(torch.tensor(value, dtype=torch.complex64), **options)
    assert found.replace(" ", "") == f"t: {expected}\n".replace(" ", "")


def test_strided_views(printed):
    value = torch.arange(12).view(3, 4)
    assert printed(value.t()[1:3]) == "t: (\n ( 1, 5, 9)\n ( 2, 6,10)\n)\n"
    assert printed(torch.tensor([7]).expand(2, 2)) == "t: (\n (7,7)\n (7,7)\n)\n"


def test_only_the_first_character_of_separator_and_brackets_counts(printed):
    text = printed(ints(1, 2), separator="; ", open_bracket="[[", close_bracket="]]")
    assert text == "t: [1;2]\n"


def test_a_wide_row_is_broken_behind_a_separator(printed):
    text = printed(torch.arange(10, 22).view(2, 6), max_line_width=12)
    row = " ({},{},{},\n   {},{},{})\n"
    assert text == "t: (\n" + row.format(*range(10, 16)) + row.format(*range(16, 22)) + ")\n"


def test_the_line_may_be_exactly_as_wide_as_allowed(printed):
    value = torch.arange(10, 15)
    assert printed(value, max_line_width=19) == "t: (10,11,12,13,14)\n"
    assert printed(value, max_line_width=18) == "t: (10,11,12,13,\n  14)\n"


def test_the_title_counts_for_the_first_line(printed):
    text = printed(torch.arange(10, 15), title="a title", max_line_width=18)
    assert text == "a title: (10,11,\n  12,13,14)\n"


def test_line_width_0_never_breaks(printed):
    text = printed(torch.arange(100), max_line_width=0)
    assert text.count("\n") == 1


def test_a_line_holds_at_least_one_element(printed):
    assert printed(ints(100, 200), max_line_width=1) == "t: (100,\n  200)\n"


def test_summary_keeps_both_ends_of_long_dimensions(printed):
    assert printed(torch.arange(1001)) == "t: (   0,   1,   2,..., 998, 999,1000)\n"
    text = printed(torch.arange(300).view(50, 6) % 10, summarise_threshold=10, edge_items=2)
    assert text == "t: (\n (0,1,...,4,5)\n (6,7,...,0,1)\n ...\n (8,9,...,2,3)\n (4,5,...,8,9)\n)\n"


def test_dimensions_of_up_to_twice_the_edge_are_whole_in_a_summary(printed):
    text = printed(torch.arange(12).view(2, 6) % 10, summarise_threshold=1)
    assert text == "t: (\n (0,1,2,3,4,5)\n (6,7,8,9,0,1)\n)\n"


def test_threshold_0_never_summarises(printed):
    assert "..." not in printed(torch.arange(2000), summarise_threshold=0)
    assert "..." not in printed(torch.arange(1000))


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [
        (1.4962566, 8, "1.4962566"),
        (1.0, 2, "1.0"),
        (0.0, 8, "0.0000000"),
        (0.5, 3, "0.50"),
        (123.456, 4, "123.5"),
        (123456.0, 4, "123456.0"),
    ],
)
def test_digits_are_those_of_the_largest_element(printed, value, digits, expected):
    text = printed(torch.tensor(value), digits=digits, float_format="fixed")
    assert text == f"t: {expected}\n"


def test_decimals_follow_the_largest_magnitude(printed):
    text = printed(torch.tensor([1.23456, -123.456]), digits=5)
    assert text == "t: (   1.23,-123.46)\n"


def test_scientific(printed):
    value = torch.tensor([1.4962566, -0.0])
    text = printed(value, digits=8, float_format="scientific")
    assert text == "t: ( 1.4962566e+00,-0.0000000e+00)\n"
    text = printed(torch.tensor(-1.5e-20), digits=2, float_format="scientific")
    assert text == "t: -1.5e-20\n"


@pytest.mark.parametrize(
    ("values", "is_scientific"),
    [
        ([1.0, 1000.0], False),
        ([1.0, 1001.0], True),
        ([1e-4], False),
        ([9e-5], True),
        ([9.9e7], False),
        ([1e8], True),
        ([0.0, 1.0], False),
        ([1.0, math.inf], False),
    ],
)
def test_auto_chooses_scientific_for_wide_ranges(printed, values, is_scientific):
    assert ("e" in printed(torch.tensor(values))) == is_scientific


def test_fixed_never_has_an_exponent(printed):
    text = printed(torch.tensor([1e10, 1e-10]), float_format="fixed")
    assert text == "t: (10000000000.0,          0.0)\n"


def test_natural_form(printed):
    value = torch.tensor([1.0, 0.1, 100000.0, 1e-7, 1e20, -2.5])
    expected = "t: (1,0.1,100000,1e-07,1e+20,-2.5)\n"
    assert printed(value, float_format="none") == expected
    assert printed(value, digits=0) == expected
    assert printed(torch.tensor(0.1, dtype=torch.float64), digits=0) == "t: 0.1\n"


def test_infinities_and_nan(printed):
    value = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    assert printed(value) == "t: (  inf, -inf,  nan,1.000)\n"
    assert printed(torch.tensor(math.nan)) == "t: nan\n"


def test_an_unknown_format_is_refused(printed):
    with pytest.raises(InternalError, match="attribute 'float_format' allows 'wide'"):
        printed(torch.zeros(1), float_format="wide")
