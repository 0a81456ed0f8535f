"""The structure of asynchronously loaded elements."""

from collections import OrderedDict, namedtuple

import pytest
import torch

from popsim_torch.arguments.parsers import ICustomArgParser, registerCustomArgParser
from popsim_torch.data.layout import Layout
from popsim_torch.errors import UsageTypeError, UsageValueError

ONE, TWO = torch.ones(2), torch.arange(3)
Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize("element", [[ONE, TWO], (ONE, TWO), Pair(ONE, TWO)])
def test_sequences_come_back_as_lists(element):
    layout = Layout(element)
    built = layout.build(layout.flatten(element))
    assert type(built) is list
    assert built[0] is ONE
    assert built[1] is TWO


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_dicts_come_back_as_dicts(kind):
    element = kind(a=ONE, b=TWO)
    layout = Layout(element)
    built = layout.build(layout.flatten(element))
    assert type(built) is dict
    assert built == {"a": ONE, "b": TWO}


def test_a_tensor_comes_back_alone():
    layout = Layout(ONE)
    assert layout.build(layout.flatten(TWO)) is TWO


def test_order_of_the_keys_is_that_of_the_first_dict():
    assert Layout({"a": ONE, "b": TWO}).flatten({"b": TWO, "a": ONE}) == [ONE, TWO]


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ([ONE], [ONE, ONE]),
        ([ONE], (ONE,)),
        ([ONE], ONE),
        (ONE, [ONE]),
        ({"a": ONE}, {"b": ONE}),
        ({"a": ONE}, {"a": ONE, "b": ONE}),
        ({"a": ONE}, [ONE]),
    ],
)
def test_all_elements_are_made_alike(first, other):
    with pytest.raises(UsageTypeError, match="All elements must have the same structure"):
        Layout(first).flatten(other)


@pytest.mark.parametrize("element", [3, "text", None, {1, 2}])
def test_other_elements_are_refused(element):
    with pytest.raises(UsageTypeError, match="an element of the dataset is a"):
        Layout(element)


@pytest.mark.parametrize("element", [[ONE, 1], [[ONE]], {"a": None}, (ONE, {"a": ONE})])
def test_containers_hold_nothing_but_tensors(element):
    with pytest.raises(UsageTypeError, match="must be flat containers of tensors"):
        Layout(element).flatten(element)


def test_tensors_must_be_dense_and_in_memory():
    for tensor in (ONE.to_sparse(), ONE.to("meta")):
        with pytest.raises(UsageValueError, match="Only dense tensors"):
            Layout(tensor).flatten(tensor)


class Named:
    def __init__(self, tensor, name):
        self.tensor = tensor
        self.name = name


class Derived(Named):
    pass


class NamedParser(ICustomArgParser):
    def yieldTensors(self, struct):
        yield struct.tensor

    def reconstruct(self, original_structure, tensor_iterator):
        return Named(next(tensor_iterator), original_structure.name)


@pytest.fixture
def named_parser():
    registerCustomArgParser(Named, NamedParser())
    yield
    registerCustomArgParser(Named, None)


def test_registered_types_are_reconstructed(named_parser):
    layout = Layout(Named(ONE, "first"))
    built = layout.build(layout.flatten(Named(TWO, "second")))
    assert type(built) is Named
    assert built.tensor is TWO
    assert built.name == "first"


def test_types_derived_from_registered_ones_are_refused(named_parser):
    with pytest.raises(UsageTypeError, match="is a Derived"):
        Layout(Derived(ONE, "name"))
