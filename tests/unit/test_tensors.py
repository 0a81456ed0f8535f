"""Selections of tensors: what each one takes, how they combine, and what is none."""

import copy
import re

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import tensors
from popsim_torch.errors import UsageTypeError, UsageValueError
from popsim_torch.tensors import TensorInfo
from popsim_torch.tensors.selections import as_selection, has_function, words_of

WEIGHT = TensorInfo("enc.fc.weight", (2, 4), torch.float16, "weight", "setup", "enc.fc")
GRADIENT = TensorInfo(
    "Gradient___enc.fc.weight", (2, 4), torch.float32, "gradient", "backward", "enc.fc", 1
)
RESULT = TensorInfo("head/Gemm:0", (8, 2), torch.float32, "activation", "forward", "head")
UPDATE = TensorInfo("UpdatedVar___head.bias", (2,), torch.float32, "updated weight", module="head")
STATE = TensorInfo("Accl1___head.bias", (2,), torch.float32, "optimizer state", module="head")
UNMADE = TensorInfo("AdamUpdater___head.bias", None, None, "update", "update", "head")
ALL = (WEIGHT, GRADIENT, RESULT, UPDATE, STATE, UNMADE)


def taken(select):
    selection = as_selection("here", select)
    return [one for one in ALL if selection.takes(one)]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("head/Gemm:0", [RESULT]),
        ("*.weight", [WEIGHT, GRADIENT]),
        ("*.Weight", []),
        ("weight", []),
        (tensors.Glob("[GU]*___*"), [GRADIENT, UPDATE]),
        (re.compile("weight"), [WEIGHT, GRADIENT]),
        (re.compile("^WEIGHT|gemm", re.IGNORECASE), [RESULT]),
        (lambda one: one.shape[0] == 8, [RESULT]),
        (lambda one: one.bytes, [WEIGHT, GRADIENT, RESULT, UPDATE, STATE]),
        (["head/Gemm:0", re.compile("^Accl")], [RESULT, STATE]),
        (tensors.gradients(), [GRADIENT]),
        (tensors.activations(), [RESULT]),
        (tensors.weights(), [WEIGHT]),
        (tensors.updates(), [UPDATE]),
        (tensors.states(), [STATE]),
        (tensors.buffers(), []),
        (tensors.inputs(), []),
        (tensors.of_module("enc"), [WEIGHT, GRADIENT]),
        (tensors.of_module("fc"), []),
        (tensors.of_module("h*"), [RESULT, UPDATE, STATE, UNMADE]),
        (tensors.of_dtype(torch.float16), [WEIGHT]),
        (tensors.of_dtype(torch.float16, torch.float64), [WEIGHT]),
        (tensors.of_stage(1), [GRADIENT]),
        (tensors.of_module("enc") & tensors.gradients(), [GRADIENT]),
        (tensors.gradients() | tensors.weights(), [WEIGHT, GRADIENT]),
        (tensors.of_module("head") & ~tensors.activations(), [UPDATE, STATE, UNMADE]),
        (tensors.of_module("head") & "*.bias", [UPDATE, STATE, UNMADE]),
        ("*.bias" & tensors.updates(), [UPDATE]),
        (re.compile("Gemm") | tensors.states(), [RESULT, STATE]),
        (tensors.of_module("head") & (lambda one: len(one.shape) == 1), [UPDATE, STATE]),
        (~tensors.of_dtype(torch.float32), [WEIGHT, UNMADE]),
    ],
)
def test_what_a_selection_takes(select, expected):
    assert taken(select) == expected


def test_the_parts_of_a_path_that_fit_adds_do_not_count():
    inner = TensorInfo("model/fc/Gemm:0", (2,), torch.float32, "activation", module="model.fc")
    assert tensors.of_module("fc").takes(inner)
    assert tensors.of_module("model.fc").takes(inner)
    assert not tensors.of_module("f").takes(inner)


def test_bytes_are_those_of_one_value():
    assert (WEIGHT.bytes, GRADIENT.bytes, UNMADE.bytes) == (16, 32, None)


@pytest.mark.parametrize(
    "select", [3, None, nn.ReLU(), nn.ReLU, re.compile(b"x"), {"a": 1}, ["x", 3], torch.zeros(1)]
)
def test_what_is_no_selection(select):
    with pytest.raises(UsageTypeError, match=r"^here: a .* selects no tensors\. Pass a name"):
        as_selection("here", select)


@pytest.mark.parametrize("select", [[], ()])
def test_an_empty_list_is_refused(select):
    with pytest.raises(UsageValueError, match=r"here: an empty .* selects nothing"):
        as_selection("here", select)


def test_a_wrong_operand_is_refused():
    with pytest.raises(UsageTypeError, match="&: a int selects no tensors"):
        tensors.gradients() & 3


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: tensors.of_module(nn.ReLU()), "of_module: got a ReLU, need a pattern"),
        (lambda: tensors.of_dtype(), r"of_dtype: need dtypes such as torch.float16, got \(\)"),
        (lambda: tensors.of_dtype("half"), "of_dtype: need dtypes"),
        (lambda: tensors.of_stage(True), "of_stage: need numbers of stages"),
    ],
)
def test_wrong_arguments(call, text):
    with pytest.raises(UsageTypeError, match=text):
        call()


def test_selections_are_values():
    made = tensors.gradients() & ~tensors.of_module("a*") | tensors.of_dtype(torch.half)
    again = tensors.gradients() & ~tensors.of_module("a*") | tensors.of_dtype(torch.half)
    assert made == again == copy.deepcopy(made)
    assert hash(made) == hash(again)
    assert made != tensors.gradients()


def test_a_function_is_found_anywhere_in_a_selection():
    assert has_function(as_selection("", ["x*", ~taken_by_all()]))
    assert not has_function(as_selection("", ["x*", ~tensors.weights()]))


def taken_by_all():
    return tensors.weights() | (lambda one: True)


def test_words_for_messages():
    selection = as_selection("", ["a*", re.compile("b") | ~tensors.Glob("c")])
    assert words_of(selection) == "'a*' | re.compile('b') | ~('c')"
    assert words_of(as_selection("", taken)) == "the function taken"


def test_one_class_under_its_two_names():
    assert poptorch.Glob is tensors.Glob
    assert poptorch.TensorInfo is tensors.TensorInfo
