"""Names of tensors are formed and parsed in one place."""

import pytest

from popsim_torch.ir import names


@pytest.mark.parametrize(
    ("name", "path", "expected"),
    [
        ("model.fc.weight", "model", "fc.weight"),
        ("Gradient___model.fc.weight", "model", "Gradient___fc.weight"),
        ("rate___specific___model.fc.weight", "model", "rate___specific___fc.weight"),
        ("model/fc/Gemm:0/1", "model", "fc/Gemm:0/1"),
        ("Gradient___a/0/fc/Gemm:0", "a.0", "Gradient___fc/Gemm:0"),
        ("a.0.weight", "a.0", "weight"),
        ("model.fc[1]", "model", "fc[1]"),
        ("model", "model", "(model)"),
        ("Gradient___model[1]/2", "model", "Gradient___(model)[1]/2"),
        ("models.fc.weight", "model", None),
        ("model/fc/Gemm:0", "fc", None),
        ("input/1", "model", None),
        ("Reshape:0", "model", None),
        ("input/1", "", "input/1"),
    ],
)
def test_the_name_inside_of_a_module(name, path, expected):
    assert names.inside_module(name, path) == expected


def test_inputs():
    assert all(map(names.is_input, names.inputs(12)))
    assert not any(map(names.is_input, ("input/x", "inputs", "input/1/2", "input.weight", "")))


def test_partial_gradients():
    assert names.is_partial_gradient(names.partial_gradient(3, 11))
    assert not names.is_partial_gradient("Gradient___3_11.weight")


def test_spellings_remove_the_prefix_before_they_add_it():
    assert names.spellings("model.fc") == ("model.fc", "fc", "model.model.fc")
    assert names.spellings("Gradient___fc") == ("Gradient___fc", "Gradient___model.fc")
    assert names.spellings("model/Gemm:0") == ("model/Gemm:0", "Gemm:0", "model/model/Gemm:0")
