"""The shapes that this package computes are those that PyTorch computes."""

import pytest
import torch

from popsim_torch.private_torch.fake import FakeTensor, FakeTensorMode
from popsim_torch.trace.graph.device import DEVICE
from popsim_torch.trace.graph.shape_rules import RULES
from popsim_torch.trace.graph.traced_tensors import TraceMode

aten = torch.ops.aten
SHAPES = [(4, 3), (2, 3, 5), (2, 8, 4, 6), (1, 2, 3, 4, 5), (3, 3, 3, 3)]
OPERATORS = [
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default,
    aten.native_batch_norm_backward.default,
]


def empty(*shape, **settings):
    return torch.empty(*shape, device=DEVICE, **settings)


def arguments(operator, x, training):
    channels = x.shape[1]
    numbers = [empty(channels) for _ in range(6)]
    if operator is aten.native_batch_norm_backward.default:
        return (torch.empty_like(x), x, *numbers[:5], training, 1e-5, [True, True, True])
    return (x, *numbers[:4], training, 0.1, 1e-5)


def described(results):
    return [
        (one.shape, one.stride(), one.storage_offset(), one.dtype, one.fake_device)
        for one in results
    ]


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_results_are_those_of_pytorch(operator, shape):
    found = []
    for kind in (FakeTensorMode, TraceMode):
        with kind(allow_non_fake_inputs=True):
            given = arguments(operator, empty(shape), True)
            if kind is TraceMode:
                assert RULES[operator](*given) is not None
            results = operator(*given)
            assert all(type(one) is FakeTensor for one in results)
            found.append(described(results))
    assert found[0] == found[1]


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda: empty(2, 8, 4, 6, memory_format=torch.channels_last),
        lambda: empty(2, 8, 4, 6, dtype=torch.float16),
        lambda: empty(2, 4, 8, 6).transpose(1, 2),
    ],
    ids=["channels last", "half", "transposed"],
)
def test_other_layouts_and_types_are_left_to_pytorch(operator, make):
    found = []
    for kind in (FakeTensorMode, TraceMode):
        with kind(allow_non_fake_inputs=True):
            given = arguments(operator, make(), True)
            assert RULES[operator](*given) is None
            found.append(described(operator(*given)))
    assert found[0] == found[1]


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
def test_inference_is_left_to_pytorch(operator):
    with TraceMode(allow_non_fake_inputs=True):
        given = arguments(operator, empty(2, 3, 4, 4), False)
        assert RULES[operator](*given) is None
        assert operator(*given)[0].shape == (2, 3, 4, 4)
