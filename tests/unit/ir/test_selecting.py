"""Which tensors of a program a selection means: names, patterns, and spellings of both."""

import re

import pytest
import torch

from popsim_torch import tensors
from popsim_torch.ir.selecting import choose, info_of_name, may_take, names_like, near_names
from popsim_torch.tensors import TensorInfo
from popsim_torch.tensors.selections import as_selection


def infos(*names):
    return [TensorInfo(name, (1,), torch.float32, "activation") for name in names]


def chosen(select, *names):
    return [one.name for one in choose(as_selection("", select), infos(*names)).tensors]


def test_a_string_is_the_name_before_it_is_a_pattern():
    assert chosen("x[0]", "x0", "x[0]") == ["x[0]"]
    assert chosen("x[0]", "x0", "x1") == ["x0"]
    assert chosen(tensors.Glob("x[0]"), "x0", "x[0]") == ["x0"]


def test_a_name_has_the_spellings_of_anchors():
    assert chosen("Gradient___model.fc.weight", "Gradient___fc.weight", "fc.weight") == [
        "Gradient___fc.weight"
    ]
    assert chosen("fc.weight_grad", "fc.weight", "Gradient___fc.weight") == ["Gradient___fc.weight"]


def test_a_pattern_is_tried_on_spellings_only_if_no_name_matches():
    assert chosen("model.fc*", "fc1.weight", "fc2.weight", "norm.weight") == [
        "fc1.weight",
        "fc2.weight",
    ]
    assert chosen("model.*", "model.weight", "fc.weight") == ["model.weight"]
    assert chosen("fc/Gemm:*", "model/fc/Gemm:0") == ["model/fc/Gemm:0"]


FIT = ("model.n.weight", "Gradient___model.n.weight", "model/n/Gemm:0", "model.o.weight")
PLAIN = ("n.weight", "Gradient___n.weight", "n/Gemm:0", "o.weight")


@pytest.mark.parametrize(
    "select",
    [
        "Gradient___n*",
        "n.*",
        "n/*",
        "?.weight",
        tensors.Glob("n.*") & tensors.Glob("*.weight"),
        tensors.activations() & ~tensors.Glob("n.*"),
        ~(tensors.Glob("n/*") | "Gradient___n.*"),
        tensors.Glob("*") & "n.weight",
        re.compile("^Gradient___n"),
        re.compile("^n") & tensors.activations(),
    ],
)
def test_a_selection_means_the_same_tensors_where_fit_calls_the_model(select):
    found = [PLAIN.index(name) for name in chosen(select, *PLAIN)]
    assert [FIT.index(name) for name in chosen(select, *FIT)] == found
    assert 0 < len(found) < len(PLAIN)


def test_a_module_of_the_user_may_be_called_model():
    for asked in ("model.weight", "Gradient___model.weight", "model/Gemm:0", "model.w*"):
        wrapped = asked.replace("model", "model.model").replace("model.model/", "model/model/")
        wrapped = wrapped.replace("*", "eight")
        assert chosen(asked, wrapped, "x") == [wrapped]
    assert chosen("model.weight", "weight", "model.model.weight") == ["weight"]


def test_names_of_records():
    assert names_like("n.*", FIT) == ["model.n.weight"]
    assert names_like("n.weight_grad", FIT) == ["Gradient___model.n.weight"]
    assert names_like("z*", FIT) == []


def test_tensors_come_in_their_order_and_once():
    assert chosen(["c", "a*", "[ac]"], "a", "b", "c") == ["a", "c"]


def test_parts_without_a_tensor_are_told():
    found = choose(as_selection("", ["a", "d*", tensors.weights() | "e"]), infos("a", "b"))
    assert [one.name for one in found.tensors] == ["a"]
    assert found.idle == (
        as_selection("", "d*"),
        tensors.weights(),
        as_selection("", "e"),
    )


def test_near_names_ignore_wildcards():
    assert near_names(as_selection("", "fc.wieght*"), ["fc.weight", "other"])[0] == "fc.weight"


def test_what_is_known_of_a_tensor_that_nobody_asked_for():
    found = {
        name: (info_of_name(name).kind, info_of_name(name).phase)
        for name in (
            "Gradient___0_1",
            "FinalReducedGradient___fc.weight",
            "Stashed___fc/Gemm:0",
            "Restored___fc/Gemm:0",
            "fc/Gemm:0",
            "AdamUpdater___fc.weight",
            "velocityScalingFactor1___default___FLOAT",
        )
    }
    assert list(found.values()) == [
        ("gradient", "backward"),
        ("gradient", "update"),
        ("stashed", "forward"),
        ("stashed", "backward"),
        ("activation", "forward"),
        ("update", "update"),
        ("hyper-parameter", "update"),
    ]
    assert info_of_name("AdamUpdater___a.fc.weight").module == "a.fc"


def test_tensors_that_nobody_asked_for_are_taken_by_what_is_known_of_them():
    name = "AdamUpdater___fc.weight"
    assert may_take(as_selection("", "Adam*"), name)
    assert may_take(as_selection("", "AdamUpdater___model.fc*"), name)
    assert may_take(tensors.of_module("fc"), name)
    assert may_take(tensors.of_module("fc") & tensors.Glob("AdamUpdater___model.fc*"), name)
    assert may_take(tensors.of_module("fc") & ~tensors.Glob("AdamUpdater___model.fc*"), name)
    assert not may_take(tensors.weights() & tensors.Glob("AdamUpdater___model.fc*"), name)
    assert not may_take(~tensors.Glob("Adam*"), name)
    assert not may_take(as_selection("", lambda one: True), name)
    assert not may_take(tensors.of_dtype(torch.float32), name)
