"""Tests of ``popsim_torch.arguments.structures``: containers read, compared and rebuilt."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import typing

import numpy
import pytest
import torch

from popsim_torch import inferenceModel
from popsim_torch.arguments import (
    ArgumentSpec,
    ICustomArgParser,
    OutputSpec,
    registerCustomArgParser,
)
from popsim_torch.errors import Error


def spec_of(forward, *args, **kwargs):
    return ArgumentSpec(inspect.signature(forward), args, kwargs)


def one(x):
    """A forward with one argument of any structure."""


def two(x, y):
    """A forward with two arguments."""


def ones(*shape, **options):
    return torch.ones(*shape, **options)


# --- Structures ----------------------------------------------------------------

Pair = collections.namedtuple("Pair", "left right")


class TypedPair(typing.NamedTuple):
    left: torch.Tensor
    right: int = 3


class MyList(list):
    pass


class MyDict(dict):
    pass


STRUCTURES = {
    "tensor": (lambda t: t, ["x"]),
    "list": (lambda t: [t, t], ["x[0]", "x[1]"]),
    "tuple": (lambda t: (t, (t,)), ["x[0]", "x[1][0]"]),
    "empty": (lambda t: [(), [], {}], []),
    "dict": (lambda t: {"a": t, 3: [t]}, ["x[a]", "x[3][0]"]),
    "namedtuple": (lambda t: Pair(t, [t]), ["x[0]", "x[1][0]"]),
    "typed namedtuple": (lambda t: TypedPair(t), ["x[0]"]),
    "list subclass": (lambda t: MyList([t]), ["x[0]"]),
    "dict subclass": (lambda t: MyDict(a=t), ["x[a]"]),
    "ordered dict": (lambda t: collections.OrderedDict(b=t, a=t), ["x[b]", "x[a]"]),
    "default dict": (lambda t: collections.defaultdict(list, a=t), ["x[a]"]),
    "mixed": (lambda t: [{"a": (1, t)}, None, "text"], ["x[0][a][1]"]),
    "torch result": (lambda t: torch.return_types.max([t, t]), ["x[0]", "x[1]"]),
}


def kinds(value):
    if isinstance(value, dict):
        return type(value), [(key, kinds(child)) for key, child in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [kinds(child) for child in value]
    return type(value) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize(("make", "names"), STRUCTURES.values(), ids=STRUCTURES)
def test_tensors_are_named_depth_first(make, names):
    assert list(spec_of(one, make(ones(2))).names) == names


@pytest.mark.parametrize(("make", "names"), STRUCTURES.values(), ids=STRUCTURES)
def test_unflatten_rebuilds_the_structure(make, names):
    value = make(ones(2))
    (rebuilt,), _ = spec_of(one, value).unflatten([ones(3) for _ in names])
    assert kinds(rebuilt) == kinds(value)


@pytest.mark.parametrize(("make", "names"), STRUCTURES.values(), ids=STRUCTURES)
def test_unflatten_places_the_new_tensors_in_order(make, names):
    new = [ones(3) for _ in names]
    spec = spec_of(one, make(ones(3)))
    assert [id(t) for t in spec.flatten(*spec.unflatten(new))] == [id(t) for t in new]


def test_unflatten_leaves_the_first_arguments_alone():
    first = {"a": ones(2)}
    tensor = first["a"]
    spec = spec_of(one, first)
    (rebuilt,), _ = spec.unflatten([ones(3)])
    assert rebuilt is not first and first["a"] is tensor


def test_rebuilt_default_dict_keeps_its_factory():
    spec = spec_of(one, collections.defaultdict(list, a=ones(1)))
    (rebuilt,), _ = spec.unflatten([ones(1)])
    assert rebuilt["new"] == []


def test_spec_does_not_keep_the_first_tensors():
    import weakref

    class Box(torch.Tensor):
        pass

    tensors = [ones(2).as_subclass(Box) for _ in range(3)]
    refs = [weakref.ref(t) for t in tensors]
    spec = spec_of(one, [{"a": tensors[0]}, (tensors[1],), [tensors[2]]])
    del tensors
    assert [ref() for ref in refs] == [None] * 3
    assert len(spec.names) == 3


def test_dicts_may_change_the_order_of_their_keys():
    a, b = ones(1), ones(2)
    spec = spec_of(one, {"a": a, "b": b})
    assert [id(t) for t in spec.flatten(({"b": b, "a": a},))] == [id(a), id(b)]


@pytest.mark.parametrize(("make", "names"), STRUCTURES.values(), ids=STRUCTURES)
def test_structure_of_results_is_rebuilt(make, names):
    value = make(ones(2))
    assert kinds(OutputSpec(value).unflatten([ones(3) for _ in names])) == kinds(value)


# --- Calls that differ -----------------------------------------------------------


@dataclasses.dataclass
class Settings:
    width: int


MISMATCHES = {
    "shape": (
        ones(4, 3),
        ones(2, 3),
        "Shape",
        "x",
        "torch.Size([4, 3]) but got torch.Size([2, 3])",
    ),
    "rank": (ones(4), ones(4, 1), "Shape", "x", "torch.Size([4]) but got torch.Size([4, 1])"),
    "dtype": (ones(1), ones(1).int(), "Data type", "x", "torch.float32 but got torch.int32"),
    "parameter": (
        ones(1),
        torch.nn.Parameter(ones(1)),
        "Type",
        "x",
        "<class 'torch.Tensor'> but got <class 'torch.nn.parameter.Parameter'>",
    ),
    "no tensor": (
        ones(1),
        None,
        "Type",
        "x",
        "<class 'torch.Tensor'> but got <class 'NoneType'>",
    ),
    "tensor for None": (
        None,
        ones(1),
        "Type",
        "x",
        "<class 'NoneType'> but got <class 'torch.Tensor'>",
    ),
    "list and tuple": (
        [ones(1)],
        (ones(1),),
        "Type",
        "x",
        "<class 'list'> but got <class 'tuple'>",
    ),
    "subclass": (
        {"a": ones(1)},
        MyDict(a=ones(1)),
        "Type",
        "x",
        f"<class 'dict'> but got {MyDict}",
    ),
    "length": ([ones(1)], [ones(1), ones(1)], "Length", "x", "1 but got 2"),
    "nested": ([{"a": ones(2)}], [{"a": ones(3)}], "Shape", "x[0][a]", "torch.Size([2]) but got"),
    "field": (Pair(ones(2), 1), Pair(ones(2), 2), "Value", "x[1]", "1 but got 2"),
    "constant": (3, 4, "Value", "x", "3 but got 4"),
    "type of constant": (True, 1, "Type", "x", "<class 'bool'> but got <class 'int'>"),
    "text": ("mean", "sum", "Value", "x", "mean but got sum"),
    "array": (numpy.zeros(2), numpy.ones(2), "Value", "x", "[0. 0.] but got [1. 1.]"),
    "array shape": (numpy.zeros(2), numpy.zeros(1), "Value", "x", "[0. 0.] but got [0.]"),
    "dataclass": (Settings(1), Settings(2), "Value", "x", "Settings(width=1) but got"),
    "long text": ("a" * 999, "b" * 999, "Value", "x", f"{'a' * 200}... but got {'b' * 200}..."),
}


@pytest.mark.parametrize(
    ("first", "later", "kind", "name", "text"), MISMATCHES.values(), ids=MISMATCHES
)
def test_differing_call_names_argument_and_values(first, later, kind, name, text):
    spec = spec_of(one, first)
    with pytest.raises(Error) as caught:
        spec.flatten((later,))
    assert caught.value.message.startswith(f"{kind} mismatch for {name}: expected {text}")


@pytest.mark.parametrize(
    ("later", "text"),
    [
        ({"a": 1}, "Missing arguments: ['b', 'c']"),
        ({"a": 1, "c": 1, "b": 1, "z": 1, "y": 1}, "Unexpected arguments: ['y', 'z']"),
        ({"a": 1, "d": 1, "c": 1}, "Unexpected arguments: ['d'], Missing arguments: ['b']"),
    ],
)
def test_other_keys_are_named_in_order(later, text):
    spec = spec_of(one, {"c": 1, "b": 1, "a": 1})
    with pytest.raises(Error) as caught:
        spec.flatten((later,))
    assert caught.value.message.startswith(f"Keys mismatch for x: {text}. ")


def test_the_error_survives_a_constant_that_cannot_be_shown():
    class Shy:
        def __init__(self, number):
            self.number = number

        def __eq__(self, other):
            return self.number == other.number

        __hash__ = None

        def __repr__(self):
            raise ValueError

    spec = spec_of(one, Shy(1))
    with pytest.raises(Error, match=r"Value mismatch for x: expected <.*Shy object"):
        spec.flatten((Shy(2),))


def test_differing_call_advises():
    spec = spec_of(one, ones(2))
    with pytest.raises(Error, match=r"destroy\(\).*a new wrapper"):
        spec.flatten((ones(3),))


@pytest.mark.parametrize(
    "make",
    [
        lambda: float("nan"),
        lambda: numpy.float32("nan"),
        lambda: numpy.array([1.0, float("nan")]),
        lambda: numpy.array(["a", None], dtype=object),
        lambda: {1, 2},
        lambda: Settings(3),
        lambda: torch.float16,
        lambda: torch.device("cpu"),
        lambda: len,
        lambda: "text" * 2,
    ],
)
def test_equal_constants_are_the_same_call(make):
    assert spec_of(one, make()).flatten((make(),)) == []


def test_constants_reach_forward_as_they_are():
    settings = Settings(3)
    assert spec_of(one, settings).unflatten([])[0][0] is settings


@pytest.mark.parametrize("make", [lambda: numpy.zeros(2), lambda: {1}, lambda: Settings(1)])
def test_constant_changed_in_place_is_refused(make):
    value = make()
    spec = spec_of(one, value)
    if isinstance(value, numpy.ndarray):
        value += 1
    elif isinstance(value, set):
        value.add(2)
    else:
        value.width = 2
    with pytest.raises(Error, match="Value mismatch for x: "):
        spec.flatten((value,))


def test_constant_without_equality_must_be_the_same_object():
    class Opaque:
        pass

    first = Opaque()
    spec = spec_of(one, first)
    assert spec.flatten((first,)) == []
    with pytest.raises(Error, match="Value mismatch for x: "):
        spec.flatten((Opaque(),))


def test_constant_that_cannot_be_compared_must_be_the_same_object():
    @dataclasses.dataclass
    class Holder:
        tensor: torch.Tensor

    first = Holder(ones(3))
    spec = spec_of(one, first)
    assert spec.flatten((first,)) == []
    with pytest.raises(Error, match="Value mismatch for x: "):
        spec.flatten((Holder(ones(3)),))


def test_containers_that_contain_themselves_are_refused():
    class Net(torch.nn.Module):
        def forward(self, tree):
            return tree["x"] * 2

    tree = {"x": torch.ones(1)}
    tree["children"] = [{"parent": tree}]
    with pytest.raises(Error, match=r"tree has containers in containers.*one that contains itself"):
        inferenceModel(Net())(tree)
    del tree["children"]
    assert torch.equal(inferenceModel(Net())(tree), torch.full((1,), 2.0))


# --- Custom types -----------------------------------------------------------------


class Batch:
    def __init__(self, image, label, note="", host=None):
        self.image, self.label, self.note, self.host = image, label, note, host


class DerivedBatch(Batch):
    pass


class BatchParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.image
        yield struct.label
        if struct.host is not None:
            yield struct.host

    def reconstruct(self, original_structure, tensor_iterator):
        old = original_structure
        image, label = next(tensor_iterator), next(tensor_iterator)
        return type(old)(image, label, old.note, old.host)


@pytest.fixture
def batch_parser():
    parser = BatchParser()
    registerCustomArgParser(Batch, parser)
    yield parser
    registerCustomArgParser(Batch, None)


def test_custom_type_is_flattened_in_the_order_of_its_parser(batch_parser):
    image, label = ones(2), ones(3)
    spec = spec_of(one, [Batch(image, label)])
    assert spec.names == ("x[0].yieldTensors()[0]", "x[0].yieldTensors()[1]")
    assert [id(t) for t in spec.flatten(([Batch(image, label)],))] == [id(image), id(label)]


def test_custom_type_is_rebuilt(batch_parser):
    image, label = ones(4), ones(5)
    (rebuilt,), _ = spec_of(one, Batch(ones(2), ones(3), "note")).unflatten([image, label])
    assert type(rebuilt) is Batch and rebuilt.note == "note"
    assert rebuilt.image is image and rebuilt.label is label


def test_parser_serves_derived_types(batch_parser):
    (rebuilt,), _ = spec_of(one, DerivedBatch(ones(2), ones(3))).unflatten([ones(2), ones(3)])
    assert type(rebuilt) is DerivedBatch


def test_parser_of_the_exact_type_comes_first(batch_parser):
    class Silent(ICustomArgParser):
        def yieldTensors(self, struct):
            return iter(())

        def reconstruct(self, original_structure, tensor_iterator):
            return original_structure

    registerCustomArgParser(DerivedBatch, Silent())
    try:
        assert spec_of(one, DerivedBatch(ones(2), ones(3))).names == ()
    finally:
        registerCustomArgParser(DerivedBatch, None)


def test_custom_type_with_another_shape_is_refused(batch_parser):
    spec = spec_of(one, Batch(ones(2), ones(3)))
    with pytest.raises(Error, match=r"Shape mismatch for x.yieldTensors\(\)\[1\]: "):
        spec.flatten((Batch(ones(2), ones(4)),))


def test_custom_type_with_more_tensors_is_refused(batch_parser):
    spec = spec_of(one, Batch(ones(2), ones(3)))
    with pytest.raises(Error, match="Length mismatch for x: expected 2 but got 3"):
        spec.flatten((Batch(ones(2), ones(3), host=ones(1)),))


def test_removed_parser_makes_the_type_a_constant(batch_parser):
    registerCustomArgParser(Batch, None)
    assert spec_of(one, Batch(ones(2), ones(3))).names == ()


def test_parser_must_be_an_instance():
    with pytest.raises(Error, match="parser for Batch must be an instance"):
        registerCustomArgParser(Batch, BatchParser)


def test_parsed_type_must_be_a_type():
    with pytest.raises(Error, match="'Batch' is not a type"):
        registerCustomArgParser("Batch", BatchParser())


def test_parser_must_define_both_methods():
    class Half(ICustomArgParser):
        def yieldTensors(self, struct):
            return iter(())

    with pytest.raises(TypeError, match="reconstruct"):
        Half()


def test_custom_result_is_rebuilt(batch_parser):
    image, label = ones(4), ones(5)
    result = OutputSpec(Batch(ones(2), ones(3))).unflatten([image, label])
    assert result.image is image and result.label is label


def test_custom_result_gets_only_tensors_of_the_device(batch_parser):
    host = ones(9)
    original = Batch(ones(2), ones(3), host=host)
    with pytest.warns(UserWarning, match="Output expected to be on the IPU"):
        spec = OutputSpec(original, on_device=lambda t: t is not host)
    assert len(spec.flatten(original)) == 2
    assert spec.unflatten([ones(2), ones(3)]).host is host
