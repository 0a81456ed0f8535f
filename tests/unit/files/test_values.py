"""Values become JSON and come back unchanged; other objects are refused."""

import json
import math
import os
from collections import OrderedDict, namedtuple

import numpy
import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.errors import Error
from popsim_torch.files import values
from popsim_torch.files.parts import pack, unpack
from popsim_torch.files.values import decode
from popsim_torch.ir import (
    NOWHERE,
    LoopCounts,
    Op,
    Origin,
    Phase,
    Tensor,
    TensorArgument,
    TensorKind,
)

Point = namedtuple("Point", "x y")


def there_and_back(value):
    return unpack(pack("value", value, "value"), "value")


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -1, 2**100, 0.1, -0.0, 1e-320, math.inf, -math.inf, "", "a\ud800"),
        *([], [1, [2.0, "3"]], (), (1, (2,)), {}, {"a": [1], 2: (3,)}, {1, 2}, frozenset("ab")),
        *(1 + 2j, b"\0\xff", slice(1, None, 2), range(3, 9, 2), torch.Size([2, 3])),
        *(torch.float16, torch.device("cpu"), torch.int64, poptorch.OutputMode.EveryN),
        OrderedDict([("b", 1), ("a", 2)]),
        Op("relu", [1], [2], {"a": [1.0], "b": [TensorArgument(0), None]}, Phase.UPDATE, 3, "r"),
        Origin("scope", 1, True, None, "file:3"),
        LoopCounts(3, 4),
        Point(1, [Point("x", "y")]),
    ],
    ids=repr,
)
def test_data_comes_back(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)
    assert repr(found) == repr(value)


def test_nan_comes_back():
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float64,
        torch.int64,
        torch.uint8,
        torch.bool,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_tensors_come_back(dtype, shape):
    tensor = torch.ones(shape).to(dtype)
    found = there_and_back({"t": tensor})["t"]
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    assert found.shape == tensor.shape


def test_tensors_that_share_memory_come_back_apart():
    base = torch.arange(6.0)
    tensors = [base, base[2:], base.view(2, 3).t(), base, base.view(6)]
    found = there_and_back(tensors)
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    assert found[0] is found[3]
    found[1].zero_()
    assert torch.equal(found[0], base)


def test_numpy_values_come_back():
    array, scalar = numpy.arange(6, dtype=numpy.int16).reshape(2, 3), numpy.float32(0.1)
    found = there_and_back([array, scalar])
    assert numpy.array_equal(found[0], array)
    assert found[0].dtype == array.dtype
    assert found[1] == scalar
    assert type(found[1]) is numpy.float32


def test_strategies_come_back():
    strategy = poptorch.PipelinedExecution("a", poptorch.Stage("b", "c").ipu(1))
    found = there_and_back(strategy)
    assert repr(found) == repr(strategy)
    assert found.stage("c") is found.stages[1]


class Custom(dict):
    pass


class Tagged(tuple):
    pass


@pytest.mark.parametrize(
    "value",
    [
        object(),
        len,
        int,
        Custom(),
        Tagged(),
        os,
        lambda: 0,
        torch.nn.Linear(1, 1),
        numpy.array([None]),
        Exception("x"),
        iter([]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_more_than_data_is_refused(value):
    with pytest.raises(Error, match=r"The thing holds a .*can hold only data"):
        pack("value", [value], "The thing")


def test_local_named_tuples_are_refused():
    local = namedtuple("local", "a")
    with pytest.raises(Error, match="can hold only data"):
        pack("value", local(1), "The thing")


def test_a_list_that_holds_itself_is_refused():
    value = []
    value.append(value)
    with pytest.raises(Error, match="cannot be written"):
        pack("value", value, "The thing")


# --- Reading ------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"unknown": []},
        {"os.system": ["true"]},
        {"tuple": 1, "list": 2},
        {"tuple": 3},
        {"tensor": 0},
        {"tensor": -1},
        {"tensor": True},
        {"placeholder": 0},
        {"dtype": "nn"},
        {"dtype": "load"},
        {"dtype": 3},
        {"float": "much"},
        {"enum": ["os", "path"]},
        {"enum": ["OutputMode", "Some"]},
        {"enum": 1},
        {"dict": [[{"dict": []}, 1]]},
        {"dict": [1]},
        {"bytes": "xy"},
        {"device": "nowhere"},
        {"range": [1, 2, 0]},
        {"LoopCounts": {"device_iterations": "1", "gradient_accumulation": 1}},
        {"LoopCounts": {"device_iterations": True, "gradient_accumulation": 1}},
        {"LoopCounts": {"device_iterations": 1}},
        {"LoopCounts": {"device_iterations": 1, "gradient_accumulation": 1, "more": 1}},
        {"LoopCounts": [1, 2]},
        {"Op": {"kind": "relu", "inputs": [1.5], "outputs": []}},
        {
            "Op": {
                "kind": "relu",
                "inputs": [],
                "outputs": [],
                "attributes": {"dict": [["a", None]]},
            }
        },
        {"Graph": {}},
        {"Graph": {"tensors": [1], "ops": [], "names": {"dict": []}}},
        {"namedtuple": ["os", "system", [], []]},
        {"namedtuple": {"range": [0, 4]}},
        {"namedtuple": [__name__, "Point", ["x", "y"], {"range": [0, 2]}]},
        {"namedtuple": [__name__, "Point", {"range": [0, 2]}, [1, 2]]},
        {"enum": {"tuple": ["OutputMode", "All"]}},
        {"dict": [{"range": [0, 2]}]},
        {"dict": {"tuple": []}},
        {"ordered": [{"tuple": [0, 2]}]},
        {"slice": {"range": [0, 2]}},
        {"float": {"tensor": 0}},
        {"dtype": ["float32"]},
        {"bytes": []},
    ],
    ids=json.dumps,
)
def test_what_stands_for_no_value_is_refused(data):
    with pytest.raises((ValueError, Error)):
        decode(data, [])


def test_reading_imports_nothing():
    data = {"namedtuple": ["this", "Anything", ["a"], [1]]}
    with pytest.raises(Error, match="this program has not imported it"):
        decode(data, [])
    import sys

    assert "this" not in sys.modules


def test_reading_looks_at_dictionaries_alone(monkeypatch):
    class Lazy(type(os)):
        def __getattr__(self, name):
            raise AssertionError("an attribute was asked for")

    import sys

    monkeypatch.setitem(sys.modules, "lazy_module", Lazy("lazy_module"))
    with pytest.raises(Error, match="has not imported it"):
        decode({"namedtuple": ["lazy_module", "Thing", ["a"], [1]]}, [])


def test_a_named_tuple_with_other_fields_is_refused():
    data = {"namedtuple": [__name__, "Point", ["x", "z"], [1, 2]]}
    with pytest.raises(Error, match="has not imported it"):
        decode(data, [])


def test_every_record_has_checks_for_its_fields():
    for tag, kind in values.RECORDS.items():
        assert set(values._field_checks(tag)) == set(kind.__dataclass_fields__)


@pytest.mark.parametrize("depth", [5_000, 200_000])
def test_deep_nesting_is_refused(depth):
    sections = {
        "value": b"[" * depth + b"]" * depth,
        "value.tensors": pack("v", 0, "")["v.tensors"],
    }
    with pytest.raises(ValueError, match="cannot be read"):
        unpack(sections, "value")


def test_fields_that_have_their_defaults_are_left_out():
    tensor = Tensor(0, TensorKind.INPUT, torch.float32, (2,), (1,))
    text = pack("value", [tensor, Op("relu", [0], [1])], "value")["value"].decode()
    assert "base" not in text
    assert "origin" not in text
    assert there_and_back(Op("relu", [0], [1])).origin == NOWHERE


@pytest.mark.parametrize("kind", ["tuple", "size", "set", "frozenset", "range", "dict", "ordered"])
def test_a_few_characters_stand_for_little_memory(kind):
    endless = {"range": [0, 2**40]}
    for content in (endless, [endless], [endless, endless]):
        with pytest.raises(ValueError, match=r"needs a list|more than 1048576 numbers"):
            decode({kind: content}, [])


def test_a_range_that_would_not_be_read_is_not_written():
    assert there_and_back(range(0, 2**40, 2**20)) == range(0, 2**40, 2**20)
    with pytest.raises(Error, match=r"The thing holds range.*at most 1048576 numbers"):
        pack("value", range(2**20 + 1), "The thing")
