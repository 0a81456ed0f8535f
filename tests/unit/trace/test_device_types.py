"""Dtypes in forward: the dtype that a tensor shows, and what can be done with it."""

import logging

import pytest
import torch

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.names.common import Function

INDICES = torch.tensor([2, 0, 1])
VALUES = torch.tensor([[1.5, -2.0, 0.25], [3.0, 0.5, -1.0], [0.75, 8.0, 4.0]])


def run(function, *inputs):
    return poptorch.inferenceModel(Function(function), make_options())(*inputs)


FLOAT, INT = torch.float32, torch.int32
SEEN = {
    "int64 input": (lambda x, i: i, INT),
    "zeros of float64": (lambda x, i: torch.zeros(2, dtype=torch.float64), FLOAT),
    "ones of bfloat16": (lambda x, i: torch.ones(2, dtype=torch.bfloat16), FLOAT),
    "full of int64": (lambda x, i: torch.full((2,), 3), INT),
    "data of float64": (lambda x, i: torch.tensor([1.5], dtype=torch.float64), FLOAT),
    "data of Python": (lambda x, i: torch.tensor([1, 2]), INT),
    "arange": (lambda x, i: torch.arange(4), INT),
    "new_zeros of float64": (lambda x, i: x.new_zeros(3, dtype=torch.float64), FLOAT),
    "to float64": (lambda x, i: x.to(torch.float64), FLOAT),
    "to the type of another": (lambda x, i: x.to(i.dtype), INT),
    "type": (lambda x, i: x.type(torch.bfloat16), FLOAT),
    "double": (lambda x, i: x.double(), FLOAT),
    "bfloat16": (lambda x, i: x.bfloat16(), FLOAT),
    "half": (lambda x, i: x.half(), torch.float16),
    "long": (lambda x, i: x.long(), INT),
    "argmax": (lambda x, i: x.argmax(1), INT),
    "topk": (lambda x, i: x.topk(2)[1], INT),
    "sum of booleans": (lambda x, i: (x > 0).sum(), INT),
    "sum in float64": (lambda x, i: x.sum(dtype=torch.float64), FLOAT),
    "comparison": (lambda x, i: x > 0, torch.bool),
    "host tensor": (lambda x, i: x + VALUES.double(), FLOAT),
    "host tensor of bfloat16": (lambda x, i: VALUES.bfloat16().to(x.device), FLOAT),
}


def test_what_forward_sees_is_what_comes_back():
    seen = {}

    def forward(x, i):
        results = {case: function(x, i) for case, (function, _) in SEEN.items()}
        seen.update({case: result.dtype for case, result in results.items()})
        return results

    expected = {case: dtype for case, (_, dtype) in SEEN.items()}
    found = run(forward, VALUES, INDICES)
    assert seen == expected
    assert {case: result.dtype for case, result in found.items()} == expected
    for case, (function, _) in SEEN.items():
        eager = function(VALUES, INDICES).double()
        torch.testing.assert_close(found[case].double(), eager, rtol=1e-2, atol=0)


TYPES = {
    "own": lambda x: (x > 0).type(x.type()),
    "name": lambda x: x.type("torch.HalfTensor"),
    "class": lambda x: x.type(torch.LongTensor),
    "keyword": lambda x: x.type(dtype="torch.DoubleTensor") + x,
    "compared": lambda x: x * (x.type() == "torch.FloatTensor" and x.half().type() != x.type()),
}


@pytest.mark.parametrize("name", TYPES)
def test_classes_of_tensors(name):
    function = TYPES[name]
    eager = function(VALUES)
    torch.testing.assert_close(run(function, VALUES), eager, check_dtype=name == "own")


def test_an_unknown_class_of_tensors():
    with pytest.raises(ValueError, match=r"invalid type: 'torch.RoundTensor'"):
        run(lambda x: x.type("torch.RoundTensor"), VALUES)


def test_float64_and_bfloat16_lose_nothing_of_float32():
    x = torch.tensor([1.0009765625, 3.1415927])
    assert torch.equal(run(lambda x: x.bfloat16() * 1.0, x), x)
    assert torch.equal(run(lambda x: x.to(torch.double).to(torch.bfloat16), x), x)


def test_a_host_tensor_that_is_narrowed_is_warned_of(caplog):
    table = VALUES.double()
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        run(lambda x: x + table, VALUES)
    assert "torch.float64, which the device holds as torch.float32" in caplog.text


INDEXED = {
    "gather": lambda x, i: x.gather(1, i.unsqueeze(0)),
    "gather by name": lambda x, i: torch.gather(x, dim=1, index=i.unsqueeze(0)),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i.unsqueeze(0), 1),
    "index_select": lambda x, i: x.index_select(0, i),
    "indexing": lambda x, i: x[i],
    "scatter": lambda x, i: x.scatter(1, i.unsqueeze(0), x * 2),
    "scatter_add in place": lambda x, i: x.clone().scatter_add_(0, i.unsqueeze(0), x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i.unsqueeze(0), x, "amax"),
    "one_hot": lambda x, i: torch.nn.functional.one_hot(i, 4),
    "embedding": lambda x, i: torch.nn.functional.embedding(i, x),
    "cross_entropy": lambda x, i: torch.nn.functional.cross_entropy(x, i),
}


@pytest.mark.parametrize("case", INDEXED)
def test_integers_of_32_bits_are_indices(case):
    function = INDEXED[case]
    found = run(lambda x, i: function(x, i.int()), VALUES, INDICES)
    eager = function(VALUES, INDICES)
    torch.testing.assert_close(found, eager.to(found.dtype))


def set_items(target, i):
    target[i] = i * 2
    return target


# In forward the zeros have 32 bits, and the values written into them have 64.
PUT = {
    "scatter": lambda i: torch.zeros(3, dtype=i.dtype).scatter_(0, i, i),
    "index_put": lambda i: torch.zeros(3, dtype=i.dtype).index_put((i,), i + 1),
    "items": lambda i: set_items(torch.zeros(3, dtype=i.dtype), i),
    "index_add": lambda i: torch.zeros(3, dtype=i.dtype).index_add_(0, i, i),
    "index_copy": lambda i: torch.zeros(3, dtype=i.dtype).index_copy(0, i, i),
}


@pytest.mark.parametrize("case", PUT)
def test_integers_go_where_others_are(case):
    assert run(PUT[case], INDICES).tolist() == PUT[case](INDICES).tolist()


BINS = torch.tensor([0, 1, 1, 3])
WEIGHTS = torch.tensor([0.5, 1.5, 2.0, 4.0])
COUNTS = {
    "function": (lambda i, w: torch.bincount(i, minlength=6), 6),
    "method": (lambda i, w: i.bincount(minlength=6), 6),
    "of 32 bits": (lambda i, w: torch.bincount(i.int(), minlength=5), 5),
    "by name": (lambda i, w: torch.bincount(input=i, minlength=4), 4),
    "weights": (lambda i, w: torch.bincount(i, w, 6), 6),
    "integer weights": (lambda i, w: torch.bincount(i, (2 * w).int(), minlength=6), 6),
}


@pytest.mark.parametrize("case", COUNTS)
def test_bincount(case):
    function, size = COUNTS[case]
    found, eager = run(function, BINS, WEIGHTS), function(BINS, WEIGHTS)
    assert found.shape == (size,)
    assert found.dtype == (FLOAT if eager.is_floating_point() else INT)
    torch.testing.assert_close(found, eager.to(found.dtype))


def test_bincount_has_as_many_bins_as_it_is_told():
    found = run(lambda i: torch.bincount(i, minlength=2), BINS)
    assert found.tolist() == [1, 2]


def test_bincount_of_values_of_a_run_needs_a_number_of_bins():
    with pytest.raises(poptorch.Error, match="bincount"):
        run(lambda i: torch.bincount(i), BINS)


def test_bincount_of_known_values_needs_none():
    found = run(lambda x: torch.bincount(torch.tensor([1, 2, 2]).to(x.device)) + x.sum(), VALUES)
    assert found.shape == (3,)


EAGERS_WORDS = {
    "images": lambda i: torch.bincount(i.view(1, 3), minlength=2),
    "one number": lambda i: torch.bincount(i[0], minlength=2),
    "booleans": lambda i: torch.bincount(i > 0, minlength=2),
    "floats": lambda i: torch.bincount(i.float(), minlength=2),
    "another length": lambda i: torch.bincount(i, torch.ones(2), minlength=2),
    "a negative length": lambda i: torch.bincount(i, minlength=-1),
}


@pytest.mark.parametrize("case", EAGERS_WORDS)
def test_bincount_refuses_in_eagers_words(case):
    with pytest.raises(RuntimeError) as expected:
        EAGERS_WORDS[case](INDICES)
    with pytest.raises(RuntimeError) as found:
        run(EAGERS_WORDS[case], INDICES)
    assert str(expected.value) in str(found.value)


def test_bincount_adds_half_weights_up_as_floats():
    counts = run(lambda i, w: torch.bincount(i, w, minlength=1), INDICES * 0, VALUES[0].half())
    assert counts.dtype == torch.float32 and counts.tolist() == [-0.25]


REINTERPRETED = {
    "float as int": lambda x, i: x.view(torch.int32),
    "by name": lambda x, i: x.view(dtype=torch.int32) & 0x7FFFFFFF,
    "computed": lambda x, i: (2 * x).view(torch.int32) >> 23,
    "there and back": lambda x, i: (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32),
    "float as half": lambda x, i: x.view(torch.float16),
    "half as short": lambda x, i: x.half().view(torch.int16),
    "float as bytes": lambda x, i: x.view(torch.uint8),
    "what is seen as int32": lambda x, i: i.view(torch.float32),
    "same type": lambda x, i: x.view(torch.float32) + 1,
    "transposed": lambda x, i: x.t().view(torch.int32),
}


@pytest.mark.parametrize("case", REINTERPRETED)
def test_memory_read_as_another_type(case):
    expected = REINTERPRETED[case](VALUES, INDICES.int())
    found = run(REINTERPRETED[case], VALUES, INDICES)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bfloat16])
def test_memory_is_not_read_as_what_the_device_does_not_have(dtype):
    with pytest.raises(poptorch.Error, match="does not support this dtype"):
        run(lambda x: x.view(dtype), VALUES[:2, :2].contiguous())


SIZES = {
    "int64": (torch.zeros(2, 3, dtype=torch.int64), 4),
    "int32": (torch.zeros(2, 3, dtype=torch.int32), 4),
    "float64": (torch.zeros(2, 3, dtype=torch.float64), 4),
    "float32": (torch.zeros(2, 3), 4),
    "float16": (torch.zeros(2, 3, dtype=torch.float16), 2),
    "int8": (torch.zeros(2, 3, dtype=torch.int8), 1),
    "booleans": (torch.zeros(2, 3, dtype=torch.bool), 1),
}


@pytest.mark.parametrize("case", SIZES)
def test_an_element_takes_as_many_bytes_as_on_the_device(case):
    tensor, size = SIZES[case]
    seen = []

    def function(x):
        for y in (x, x + x if x.dtype != torch.bool else x.logical_not(), x.t()):
            sizes = y.element_size(), torch.Tensor.element_size(y), y.itemsize
            seen.append((*sizes, y.dtype.itemsize, y.nbytes // y.numel()))
        return x

    run(function, tensor)
    assert seen == [(size,) * 5] * 3


def test_an_element_of_a_tensor_of_the_host_takes_what_it_takes_there():
    kept = torch.zeros(3, dtype=torch.int64)
    seen = []
    run(lambda x: seen.append((kept.element_size(), kept.nbytes)) or x, VALUES)
    assert seen == [(8, 24)]
