"""A later call whose arguments have another structure, or other constants."""

import pytest
import torch

import popsim_torch as poptorch


@pytest.fixture
def model(h):
    class Sums(h.Net):
        def forward(self, parts, factor=1):
            tensors = list(parts.values()) if isinstance(parts, dict) else parts
            return sum(tensors) * factor

    return poptorch.inferenceModel(Sums(), h.make_options())


GOOD = [torch.ones(2), torch.full((2,), 2.0)]


@pytest.mark.parametrize(
    "bad, mentioned",
    [
        (tuple(GOOD), ("list", "tuple")),
        ({"a": GOOD[0], "b": GOOD[1]}, ("list", "dict")),
        (GOOD[:1], ("2", "1")),
        ([*GOOD, GOOD[0]], ("2", "3")),
        ([GOOD[0], None], ("parts[1]", "None")),
        ([GOOD[0], 2.0], ("parts[1]", "float")),
        ([GOOD[0], torch.nn.Parameter(GOOD[1])], ("parts[1]", "Parameter")),
    ],
    ids=["tuple", "dict", "shorter", "longer", "None", "number", "Parameter"],
)
def test_a_list_of_two(model, bad, mentioned):
    expected = model(GOOD)
    with pytest.raises(poptorch.Error) as caught:
        model(bad)
    for part in ("parts", *mentioned, "destroy()"):
        assert part in str(caught.value)
    assert torch.equal(model(GOOD), expected)


def test_other_keys(model):
    good = {"a": GOOD[0], "b": GOOD[1]}
    expected = model(good)
    with pytest.raises(poptorch.Error, match=r"parts") as caught:
        model({"a": GOOD[0], "c": GOOD[1]})
    assert "'c'" in str(caught.value)
    assert torch.equal(model({"b": GOOD[1], "a": GOOD[0]}), expected)


def test_another_constant(model):
    expected = model(GOOD, 3)
    with pytest.raises(poptorch.Error, match="factor") as caught:
        model(GOOD, 4)
    assert "3" in str(caught.value)
    assert "4" in str(caught.value)
    assert torch.equal(model(GOOD, 3), expected)
    assert torch.equal(model(GOOD, factor=3), expected)


def test_a_constant_that_becomes_a_tensor(model):
    expected = model(GOOD, 3)
    with pytest.raises(poptorch.Error, match="factor"):
        model(GOOD, torch.tensor(3))
    assert torch.equal(model(GOOD, 3), expected)
