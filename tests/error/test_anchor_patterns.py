"""Anchors with a pattern that matches nothing, too much, or that is none."""

import logging

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.executor import anchor_warnings


def warnings_of(h, caplog, *anchors):
    options = h.make_options()
    for number, select in enumerate(anchors):
        options.anchorTensor(f"it{number}", select)
    model = h.train(h.Net(), options)
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        h.check_training(model)
    return model, [record.getMessage() for record in caplog.records]


def test_a_typo_warns_once_with_near_names(h, caplog):
    model, (text,) = warnings_of(h, caplog, "Gradient___fc.wieght*")
    assert text.startswith("Options.anchorTensor('it0', 'Gradient___fc.wieght*'): ")
    assert f"matches none of the {len(model.getTensorNames())} tensors of this graph" in text
    assert "'Gradient___fc.weight'" in text
    assert model.getAnchoredTensor("it0") == {}
    assert model.anchor_axes("it0") == {}


def test_a_list_is_a_selection_and_each_part_is_checked(h, caplog):
    model, (text,) = warnings_of(h, caplog, ["fc.weight", "fc.bais", "Gradient___*"])
    assert "'fc.bais' matches none" in text
    assert "'fc.bias'" in text
    assert {"fc.weight", "Gradient___fc.weight"} <= set(model.getAnchoredTensor("it0"))


def test_a_pattern_that_takes_too_much_warns_with_bytes(h, caplog, monkeypatch):
    _, texts = warnings_of(h, caplog, "*")
    assert texts == []
    monkeypatch.setattr(anchor_warnings, "MOST_BYTES", 100)
    model, (text,) = warnings_of(h, caplog, "*", "fc.weight")
    found = model.getAnchoredTensor("it0")
    size = sum(value.nbytes for value in found.values())
    assert f"the {len(found) + 1} anchored tensors take {size + 48:,} bytes in each call" in text
    assert f"The pattern of 'it0' matches {len(found)} tensors, with {size:,} bytes" in text


def test_a_gibibyte_is_the_limit():
    assert anchor_warnings.MOST_BYTES == 2**30


@pytest.mark.parametrize("select", [nn.ReLU(), 3, None, torch.zeros(2), [3]])
def test_something_else_is_refused_at_once(h, select):
    options = h.make_options()
    with pytest.raises(AssertionError, match=r"anchorTensor\('it', .*selects no tensors\. Pass"):
        options.anchorTensor("it", select)
    assert options.anchored_tensors == {}


def test_the_exception_of_a_function_is_the_users(h):
    options = h.make_options().anchorTensor("it", lambda one: one.shape[7] > 1)
    model = h.train(h.Net(), options)
    with pytest.raises(IndexError):
        model(*h.good_batch())
    assert not model.isCompiled()


def test_a_short_name_of_a_tensor_of_a_pattern_is_refused(h):
    options = h.make_options().anchorTensor("all", "fc.*")
    options.anchorTensor("all/fc.weight", "fc.weight")
    text = h.refuse_training(h.Net(), options, poptorch.Error, "'all/fc.weight' is the short name")
    assert "Choose another short name" in text


def test_an_unknown_short_name_lists_those_of_patterns(h):
    model = h.train(h.Net(), h.make_options().anchorTensor("weights", "fc.*"))
    model(*h.good_batch())
    for method in (model.getAnchoredTensor, model.anchor_axes):
        with pytest.raises(AssertionError, match=r"among the 1 anchors\. Closest name: 'weights'"):
            method("weight")
