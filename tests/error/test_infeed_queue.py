"""Mistakes with queues into a program."""

import pytest
import torch
from torch.utils.data import DataLoader

import popsim_torch as poptorch
from popsim_torch.errors import Error
from popsim_torch.loops import function, repeat


def run(elements, iterations):
    infeed = poptorch.InfeedQueue(elements)

    @function
    def program():
        repeat(iterations, lambda *args, **kwargs: None, infeed=infeed)

    program()


@pytest.mark.parametrize("depth", [0, 256, -1, 2.0, True, None, "3"])
def test_prefetch_depth(depth):
    with pytest.raises(Error) as caught:
        poptorch.InfeedQueue([1.0], prefetch_depth=depth)
    text = f"InfeedQueue: prefetch_depth must be an integer from 1 to 255, got {depth!r}."
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"device_ordinal": -1}, "device_ordinal must be an integer of 0 or more, got -1"),
        ({"device_ordinal": 0.5}, "device_ordinal must be an integer of 0 or more, got 0.5"),
        ({"optimise_latency": 1}, "optimise_latency must be True or False, got 1"),
        ({"repeat": 3}, "repeat must be True or False, got 3"),
    ],
)
def test_settings(settings, text):
    with pytest.raises(Error, match=text):
        poptorch.InfeedQueue([1.0], **settings)


def test_hints_are_accepted():
    infeed = poptorch.InfeedQueue([1.0], 255, device_ordinal=3, optimise_latency=True)
    assert infeed.prefetch_depth == 255


def test_an_incomplete_last_batch():
    loader = DataLoader(torch.arange(7.0).reshape(7, 1), batch_size=2)
    with pytest.raises(Error) as caught:
        run(loader, 4)
    assert "element 3 is (float32[1, 1]), and the first one was (float32[2, 1])" in str(
        caught.value
    )
    assert "drop_last=True" in str(caught.value)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"x": torch.ones(2), "y": 1.0}, r"element 1 is .*float32\[\] at \['y'\]"),
        ({"x": torch.ones(3), "y": 1}, r"float32\[3\] at \['x'\]"),
        ({"x": torch.ones(2)}, r"element 1 is \(float32\[2\] at \['x'\]\)"),
        ((torch.ones(2), 1), r"element 1 is \(float32\[2\] at \[0\]"),
        ({"x": torch.ones(2), "y": "one"}, r"element 1\['y'\] is a str"),
    ],
    ids=str,
)
def test_an_element_of_another_kind(second, text):
    with pytest.raises(Error, match=text):
        run([{"x": torch.ones(2), "y": 1}, second], 2)


@pytest.mark.parametrize(
    ("element", "text"),
    [
        ("text", "the element is a str"),
        (None, "the element is a NoneType"),
        ((), "which has no tensor in it"),
        ({1: torch.ones(1)}, r"keys of an element are \[1\]"),
        (torch.ones(2).to_sparse(), "the element is torch.sparse_coo"),
        (torch.ones(2, device="meta"), "the element has no values"),
        (torch.zeros(2, dtype=torch.uint16), "the element has the dtype uint16"),
    ],
    ids=repr,
)
def test_no_element(element, text):
    with pytest.raises(Error, match=text):
        run([element], 1)


def test_get_next():
    with pytest.raises(Error, match="loops take the elements by themselves"):
        poptorch.InfeedQueue([1.0]).get_next()
