"""The kind of a queue's elements: simple elements take a short path, with the same tensors."""

import collections

import pytest
import torch

from popsim_torch.errors import Error, UsageTypeError
from popsim_torch.feeds.producer import ElementKind

Pair = collections.namedtuple("Pair", ["image", "label"])
X = torch.arange(6.0).reshape(2, 3)
LABEL = torch.tensor([1, 2])
FIRST = {
    "tensor": X,
    "tuple": (X, LABEL),
    "list": [X, LABEL],
    "named": Pair(X, LABEL),
    "dict": {"image": X, "label": LABEL},
    "nest": {"images": [X, (X + 1, LABEL)], "label": LABEL},
}
# Elements that differ from the first one in one respect, with the tensors they become.
LIKE_A_TENSOR = {
    "the same": (X, X),
    "transposed": (X.t().contiguous().t(), X),
    "double": (X.double(), X),
    "a parameter": (torch.nn.Parameter(X), X),
    "with a gradient": (torch.nn.Parameter(X) * 1, X),
    "negated when read": (torch._neg_view(X), -X),
    "an array": (X.numpy(), X),
}
UNLIKE_A_TENSOR = {
    "shape": X.t().contiguous(),
    "type": X.to(torch.int32),
    "complex": X.to(torch.complex64),
    "sparse": X.to_sparse(),
    "meta": X.to("meta"),
    "tuple": (X,),
    "more": [X, X],
    "text": "X",
}


@pytest.mark.parametrize("first", FIRST.values(), ids=FIRST)
def test_elements_of_each_structure(first):
    kind, tensors = ElementKind.of(first)
    again = kind.tensors_of(first, 1)
    assert kind._simple_tensors(first) is not None
    assert [tensor.dtype for tensor in again] == [dtype for dtype, _ in kind.components]
    torch.testing.assert_close(again, tensors, rtol=0, atol=0)
    for other in FIRST.values():
        if other is not first:
            with pytest.raises(Error, match=r"element 7 is .*the first one was"):
                kind.tensors_of(other, 7)


@pytest.mark.parametrize(("element", "expected"), LIKE_A_TENSOR.values(), ids=LIKE_A_TENSOR)
def test_elements_that_are_made_alike(element, expected):
    (tensor,) = ElementKind.of(X)[0].tensors_of(element, 1)
    assert tensor.is_contiguous() and not tensor.requires_grad and not tensor.is_neg()
    torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


@pytest.mark.parametrize("element", UNLIKE_A_TENSOR.values(), ids=UNLIKE_A_TENSOR)
def test_elements_that_are_none(element):
    with pytest.raises((Error, UsageTypeError), match="element 3"):
        ElementKind.of(X)[0].tensors_of(element, 3)


def test_keys_in_another_order():
    kind, _ = ElementKind.of(FIRST["dict"])
    torch.testing.assert_close(kind.tensors_of({"label": LABEL, "image": X}, 1), [X, LABEL])
