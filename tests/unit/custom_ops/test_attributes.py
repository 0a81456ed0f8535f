"""The values that attributes of custom operators can have."""

import math

import pytest

import popsim_torch as poptorch
from popsim_torch.custom_ops.attributes import checked, packed


def test_what_there_is():
    given = {"a": 1, "b": 0.5, "c": "d", "e": (1, 2), "f": [0.5, math.inf], "g": ("h",), "i": True}
    assert checked(given) == {
        **{"a": 1, "b": 0.5, "c": "d", "e": [1, 2], "f": [0.5, math.inf], "g": ["h"], "i": 1}
    }
    assert checked(None) == checked({}) == {}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", 1)], "attributes must be a dict, got list"),
        ({1: 2}, "keys of attributes must be str, got 1"),
        ({"a": None}, "the attribute 'a' must be an int, a float, a str, or a list .* got None"),
        ({"a": {"b": 1}}, "the attribute 'a' must be an int"),
        ({"a": [1, 0.5]}, "elements of the attribute 'a' must have one type, got float, int"),
        ({"a": ["b", 1]}, "must have one type, got int, str"),
        ({"a": [[1]]}, "an element of the attribute 'a' must be"),
        ({"a": []}, "the attribute 'a' is empty"),
        ({"a": "gro\u00df"}, "the attribute 'a' must be ASCII text"),
        ({"gro\u00df": 1}, "must be ASCII text"),
        ({"a": "b\0c"}, "must be ASCII text"),
        ({"a": 2**63}, "more than 64 bits"),
    ],
)
def test_what_is_a_value_error(given, message):
    with pytest.raises(ValueError, match=message) as caught:
        checked(given)
    assert isinstance(caught.value, poptorch.Error)


@pytest.mark.parametrize(
    ("value", "side"), [(1e39, "high"), (-1e39, "low"), ([1.0, 1e300], "high")]
)
def test_floats_are_those_of_32_bits(value, side):
    with pytest.raises(poptorch.Error, match=f"too {side} for a Popart float attribute") as caught:
        checked({"a": value})
    assert not isinstance(caught.value, ValueError)


def test_how_the_op_holds_them():
    given = checked({"a": [1, 2], "b c": 0.5, "d": [3], "e": "f"})
    assert packed(given) == {
        "attributes": ["int 2 a", "float - b c", "int 1 d", "str - e"],
        "ints": [1, 2, 3],
        "floats": [0.5],
        "strings": ["f"],
    }
