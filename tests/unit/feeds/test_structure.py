"""The structure of elements."""

import pickle
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch

from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.feeds.structure import Structure, as_tensor, describe, flatten

Pair = namedtuple("Pair", "left right")

NESTS = [
    1,
    (1,),
    [1, 2],
    {"a": 1, "b": (2, [3, {"c": 4}])},
    Pair(1, (2, 3)),
    (Pair(1, 2), {"x": 3}),
]


@pytest.mark.parametrize("nest", NESTS, ids=str)
def test_nests_survive(nest):
    structure, leaves = flatten(nest, "it")
    assert structure.build(leaves) == nest
    assert type(structure.build(leaves)) is type(nest)
    again = pickle.loads(pickle.dumps(structure))
    assert again == structure and again.build(leaves) == nest


def test_different_nests_differ():
    structures = [flatten(nest, "it")[0] for nest in NESTS]
    assert all((a == b) == (a is b) for a in structures for b in structures)


def test_any_mapping_is_a_dictionary_in_its_own_order():
    structure, leaves = flatten(OrderedDict(b=1, a=2), "it")
    assert list(structure.build(leaves).items()) == [("b", 1), ("a", 2)]


def test_the_order_of_keys_can_be_given():
    known, _ = flatten({"a": 1, "b": {"c": 2, "d": 3}}, "it")
    structure, leaves = flatten({"b": {"d": 3, "c": 2}, "a": 1}, "it", known)
    assert (structure, leaves) == (known, [1, 2, 3])
    other, _ = flatten({"b": {"d": 3, "e": 2}, "a": 1}, "it", known)
    assert other != known


def test_paths_and_description():
    structure, _ = flatten({"x": [1, 2], "y": 3}, "it")
    assert structure.paths() == ["['x'][0]", "['x'][1]", "['y']"]
    components = [(torch.float32, (2, 3)), (torch.int32, ()), (torch.bool, (1,))]
    text = "float32[2, 3] at ['x'][0], int32[] at ['x'][1], bool[1] at ['y']"
    assert describe(components, structure) == text
    assert describe([(torch.float16, (4,))], Structure()) == "float16[4]"


@pytest.mark.parametrize("nothing", [(), [], {}, ((), {"a": []})], ids=str)
def test_nothing_is_no_element(nothing):
    with pytest.raises(UsageTypeError, match=r"it is .* which has no tensor"):
        flatten(nothing, "it")


def frozen(array):
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (torch.ones(2), torch.ones(2)),
        (3, torch.tensor(3)),
        (2.5, torch.tensor(2.5)),
        (True, torch.tensor(True)),
        (np.arange(3, dtype=np.int16), torch.arange(3, dtype=torch.int16)),
        (np.float16(1.5), torch.tensor(1.5, dtype=torch.float16)),
        (frozen(np.ones(2)), torch.ones(2, dtype=torch.float64)),
    ],
    ids=str,
)
def test_numbers_and_arrays_are_tensors(leaf, expected):
    found = as_tensor(leaf, "it")
    assert found.dtype == expected.dtype and torch.equal(found, expected)


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ("text", "it is a str"),
        (None, "it is a NoneType"),
        (np.array(["a"]), "it is a ndarray"),
        (1j, "it is a complex"),
        (torch.zeros(1, dtype=torch.uint16), "it has the dtype uint16"),
    ],
    ids=str,
)
def test_other_leaves_are_refused(leaf, text):
    with pytest.raises(Error, match=text):
        as_tensor(leaf, "it")
