"""Tests of ``popsim_torch.arguments``: user structures to flat tensors and back."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import logging
from types import MappingProxyType

import pytest
import torch

import popsim_torch as poptorch
from popsim_torch.arguments import ArgumentSpec, OutputSpec, micro_batch_shape
from popsim_torch.errors import Error, UsageAssertionError


def spec_of(forward, *args, **kwargs):
    return ArgumentSpec(inspect.signature(forward), args, kwargs)


def one(x):
    """A forward with one argument of any structure."""


def two(x, y):
    """A forward with two arguments."""


def ones(*shape, **options):
    return torch.ones(*shape, **options)


# --- Binding to the signature ---------------------------------------------------


def test_tensors_keep_the_order_of_the_signature():
    x, y = ones(2), ones(3)
    spec = spec_of(two, x, y)
    assert [id(t) for t in spec.flatten((x, y))] == [id(x), id(y)]


def test_keywords_become_positional():
    x, y = ones(2), ones(3)
    spec = spec_of(two, y=y, x=x)
    assert [id(t) for t in spec.flatten((), {"y": y, "x": x})] == [id(x), id(y)]
    args, kwargs = spec.unflatten([x, y])
    assert args == (x, y) and kwargs == {}


def test_later_calls_may_change_between_position_and_keyword():
    x, y = ones(2), ones(3)
    assert len(spec_of(two, x, y).flatten((x,), {"y": y})) == 2


def test_default_tensor_is_an_input():
    default = ones(4)

    def forward(x, y=default):
        pass

    spec = spec_of(forward, ones(4))
    assert spec.names == ("x", "y")
    assert spec.flatten((ones(4),))[1] is default


def test_default_constant_is_filled_in():
    def forward(x, scale=2.0):
        pass

    assert spec_of(forward, ones(1)).unflatten([ones(1)])[0][1] == 2.0


def test_extra_positional_arguments_follow():
    def forward(x, *rest):
        pass

    tensors = [ones(i + 1) for i in range(3)]
    spec = spec_of(forward, *tensors)
    assert spec.names == ("x", "*rest[0]", "*rest[1]")
    assert spec.unflatten(tensors) == (tuple(tensors), {})


def test_keyword_only_arguments_stay_keywords():
    def forward(x, *, mask):
        pass

    x, mask = ones(1), ones(2)
    args, kwargs = spec_of(forward, x, mask=mask).unflatten([x, mask])
    assert args == (x,) and kwargs == {"mask": mask}


def test_keyword_only_argument_by_position_is_refused():
    default = ones(1)

    def forward(x, *, mask=default):
        pass

    spec = spec_of(forward, ones(1))
    with pytest.raises(UsageAssertionError, match=r"got 2 by position.*\(x, \*, mask="):
        spec.flatten((ones(1), ones(1)))


def test_extra_keywords_stay_keywords():
    def forward(x, **rest):
        pass

    x, mask = ones(1), ones(2)
    spec = spec_of(forward, x, mask=mask)
    assert spec.names == ("x", "**rest[mask]")
    args, kwargs = spec.unflatten([x, mask])
    assert args == (x,) and kwargs == {"mask": mask}


def test_name_of_a_positional_only_parameter_may_be_an_extra_keyword():
    def forward(x, /, **rest):
        pass

    assert spec_of(forward, ones(1), x=ones(2)).names == ("x", "**rest[x]")


def test_forward_without_inputs_is_fine():
    def forward():
        pass

    spec = spec_of(forward)
    assert spec.flatten(()) == []
    assert spec.unflatten([]) == ((), {})


def test_too_many_arguments_are_refused():
    with pytest.raises(UsageAssertionError, match=r"Too many arguments: got 2.*takes \(x\)"):
        spec_of(one, ones(1), ones(1))


def test_unknown_keyword_is_refused():
    with pytest.raises(UsageAssertionError, match=r"Unknown keyword z: forward takes \(x\)"):
        spec_of(one, ones(1), z=ones(1))


def test_argument_given_twice_is_refused():
    with pytest.raises(UsageAssertionError, match="x was given twice"):
        spec_of(two, ones(1), ones(1), x=ones(1))


def test_missing_argument_is_an_error_but_no_assertion():
    with pytest.raises(Error, match="Mandatory parameter y missing") as caught:
        spec_of(two, ones(1))
    assert not isinstance(caught.value, AssertionError)


def test_later_call_with_a_missing_argument_is_refused():
    spec = spec_of(two, ones(1), ones(1))
    with pytest.raises(Error, match="Mandatory parameter y missing"):
        spec.flatten((ones(1),))


# --- Later calls ------------------------------------------------------------


def test_number_of_extra_arguments_must_stay():
    def forward(*rest):
        pass

    spec = spec_of(forward, ones(1))
    text = "Number of positional arguments mismatch: expected 1 arguments but got 2 arguments"
    with pytest.raises(Error, match=text):
        spec.flatten((ones(1), ones(1)))


def test_the_number_of_arguments_is_looked_at_first_and_counts_the_named_ones():
    def forward(x, *rest, scale=1):
        pass

    spec = spec_of(forward, ones(1), ones(1))
    text = "Number of positional arguments mismatch: expected 2 arguments but got 1 arguments"
    with pytest.raises(Error, match=text):
        spec.flatten((ones(2),), {"scale": 2})


def test_an_extra_argument_that_differs_is_named_by_its_position():
    def forward(x, *rest):
        pass

    spec = spec_of(forward, ones(1), ones(1), ones(2))
    with pytest.raises(Error, match=r"Shape mismatch for \*rest\[1\]: "):
        spec.flatten((ones(1), ones(1), ones(3)))


def test_extra_keywords_must_stay():
    def forward(**rest):
        pass

    spec = spec_of(forward, a=ones(1))
    with pytest.raises(Error, match=r"\*\*rest: Unexpected arguments: \['b'\], Missing .*\['a'\]"):
        spec.flatten((), {"b": ones(1)})


def test_tensor_in_place_of_a_default_is_refused():
    def forward(x, y=None):
        pass

    spec = spec_of(forward, ones(1))
    with pytest.raises(Error, match=r"Type mismatch for y: expected <class 'NoneType'> but got"):
        spec.flatten((ones(1), ones(1)))


def test_default_spelled_out_is_the_same_call():
    def forward(x, y=None, *, scale=2):
        pass

    spec = spec_of(forward, ones(1))
    assert len(spec.flatten((ones(1), None), {"scale": 2})) == 1


def test_dicts_log_a_warning_once(caplog):
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        spec = spec_of(one, [{"a": ones(1)}, {"b": ones(1)}])
        spec.flatten(([{"a": ones(1)}, {"b": ones(1)}],))
    assert [r.getMessage().split(":")[0] for r in caplog.records] == ["Input x[0] is a dict"]


def test_extra_keywords_log_no_warning(caplog):
    def forward(**rest):
        pass

    spec_of(forward, a=ones(1))
    assert not caplog.records


def test_dtypes_and_shapes_are_those_of_the_call():
    spec = spec_of(two, ones(4, 2), ones(3, dtype=torch.int64))
    assert spec.dtypes == (torch.float32, torch.int64)
    assert spec.shapes == ((4, 2), (3,))


# --- Kinds of tensors ------------------------------------------------------------

INTEGERS = ["uint8", "int8", "int16", "int32", "int64", "bool"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
BAD = ["uint16", "uint32", "uint64", "float8_e5m2"]


@pytest.mark.parametrize("name", INTEGERS + FLOATS + COMPLEX)
def test_supported_dtype_passes_unchanged(name):
    x = torch.zeros(2, dtype=getattr(torch, name))
    assert spec_of(one, x).flatten((x,))[0] is x


@pytest.mark.parametrize("name", BAD)
def test_unsupported_dtype_is_refused(name):
    with pytest.raises(Error, match=rf"x\[0\] has dtype torch.{name}. Supported are: uint8, int8"):
        spec_of(one, [torch.zeros(2, dtype=getattr(torch, name))])


@pytest.mark.parametrize("shape", [(0,), (2, 0), (0, 3)])
def test_empty_tensor_is_refused(shape):
    with pytest.raises(Error, match=r"Zero-sized tensors are unsupported.*x. Got shape \[.*\]"):
        spec_of(one, torch.zeros(shape))


def test_sparse_tensor_is_refused():
    with pytest.raises(Error, match=r"x is a sparse \(torch.sparse_coo\) tensor"):
        spec_of(one, ones(2).to_sparse())


def test_sparse_tensor_in_a_later_call_is_refused():
    spec = spec_of(one, ones(2))
    with pytest.raises(Error, match="x is a sparse"):
        spec.flatten((ones(2).to_sparse(),))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensor_is_refused(layout):
    nested = torch.nested.nested_tensor([ones(2), ones(2)], layout=layout)
    with pytest.raises(Error, match="x is a nested tensor"):
        spec_of(one, nested)


@pytest.mark.filterwarnings("ignore")
def test_nested_tensor_in_a_later_call_is_refused():
    nested = torch.nested.nested_tensor([ones(2), ones(2)])
    spec = spec_of(one, ones(2, 2))
    with pytest.raises(Error, match="got that of a nested tensor"):
        spec.flatten((nested,))


@pytest.mark.filterwarnings("ignore")
def test_quantised_tensor_is_refused():
    x = torch.quantize_per_tensor(ones(2), 1.0, 0, torch.qint8)
    with pytest.raises(Error, match=r"x has dtype torch.qint8"):
        spec_of(one, x)


def test_tensor_elsewhere_is_refused():
    with pytest.raises(Error, match=r"x is on device meta.*input.cpu\(\)"):
        spec_of(one, ones(2, device="meta"))


def test_input_with_gradient_is_detached(caplog):
    x = ones(2, requires_grad=True)
    spec = spec_of(one, x)
    (flat,) = spec.flatten((x,))
    assert not flat.requires_grad and flat.data_ptr() == x.data_ptr()


def test_input_with_gradient_warns_once(caplog):
    x = ones(2, requires_grad=True)
    spec = spec_of(one, x)
    spec.flatten((x,))
    spec.flatten((x,))
    (record,) = caplog.records
    assert "Input x has requires_grad=True set: it will be detached" in record.getMessage()


def test_parameter_input_becomes_a_plain_tensor():
    x = torch.nn.Parameter(ones(2), requires_grad=False)
    assert type(spec_of(one, x).flatten((x,))[0]) is torch.Tensor


def test_non_contiguous_input_is_copied():
    x = torch.arange(6.0).reshape(2, 3).t()
    (flat,) = spec_of(one, x).flatten((x,))
    assert flat.is_contiguous() and torch.equal(flat, x)


def test_non_contiguous_inputs_warn_once_per_executor(caplog):
    x = ones(2, 3).t()
    warned = set()
    for _ in range(2):
        spec = ArgumentSpec(inspect.signature(two), (x, x), {}, warned=warned)
        spec.flatten((x, x))
    assert [r.getMessage()[:25] for r in caplog.records] == ["Input x is not contiguous"]


def test_lazy_negation_is_carried_out():
    x = torch.complex(ones(1), ones(1)).conj().imag
    assert x.is_neg()
    (flat,) = spec_of(one, x).flatten((x,))
    assert not flat.is_neg() and flat.item() == -1.0


# --- Results -----------------------------------------------------------------------


def test_lone_tensor_stays_a_lone_tensor():
    new = ones(3)
    assert OutputSpec(ones(2)).unflatten([new]) is new


def test_no_result_stays_none():
    spec = OutputSpec(None)
    assert spec.flatten(None) == [] and spec.unflatten([]) is None


def test_results_are_flattened_depth_first():
    a, b = ones(1), ones(2)
    spec = OutputSpec((a, {"k": [b]}, 3))
    assert spec.names == ("output[0]", "output[1][k][0]")
    assert [id(t) for t in spec.flatten((a, {"k": [b]}, 3))] == [id(a), id(b)]


def test_every_call_returns_containers_of_its_own():
    spec = OutputSpec([ones(1)])
    assert spec.unflatten([ones(1)]) is not spec.unflatten([ones(1)])


def test_same_tensor_twice_is_two_results():
    x = ones(1)
    assert len(OutputSpec((x, x)).flatten((x, x))) == 2


def test_constants_in_results_are_returned_as_they_are():
    settings = object()
    assert OutputSpec((settings, ones(1))).unflatten([ones(1)])[0] is settings


def test_host_tensor_is_returned_as_captured():
    device, host = ones(1), ones(2)
    with pytest.warns(
        UserWarning, match=r"Output expected to be on the IPU, but output\[1\] .* cpu"
    ):
        spec = OutputSpec((device, host), on_device=lambda t: t is device)
    assert spec.flatten((device, host)) == [device]
    assert spec.unflatten([ones(3)])[1] is host


# --- Micro-batches -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "factor", "expected"),
    [
        ((8, 3), 4, (2, 3)),
        ((8,), 8, (1,)),
        ((), 1, ()),
        (torch.Size([6, 1]), 1, (6, 1)),
    ],
)
def test_first_dimension_is_divided(shape, factor, expected):
    assert micro_batch_shape(shape, factor, argument="x", D=factor, GA=1, R=1, g=1) == expected


@pytest.mark.parametrize("shape", [(10, 3), ()])
def test_uneven_batch_names_every_factor(shape):
    with pytest.raises(UsageAssertionError) as caught:
        micro_batch_shape(shape, 12, argument="x[0]", D=3, GA=2, R=4, g=2)
    text = str(caught.value)
    for part in ("x[0]", str(shape), "F=12", "(D=3)", "(GA=2)", "(R=4)", "(g=2)"):
        assert part in text


@dataclasses.dataclass(frozen=True)
class Pair:
    first: object
    second: object = None


class Held:
    def __init__(self, tensor):
        self.tensor = tensor


def test_a_dataclass_is_built_with_new_tensors():
    new = [ones(1), ones(2)]
    spec = OutputSpec(Pair(ones(1), [3, ones(2)]))
    assert spec.names == ("output.first", "output.second[1]")
    built = spec.unflatten(new)
    assert built.first is new[0]
    assert built.second == [3, new[1]]
    assert spec.flatten(Pair(new[0], [3, new[1]])) == new


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Held(ones(1)), "Held: output"),
        ((1, Held([ones(1)])), r"Held: output\[1\]"),
        (collections.deque([ones(1)]), "deque: output"),
        (Pair(Held(ones(1))), "Held: output.first"),
        (Held({"a": (ones(1),)}), "Held: output"),
        ({"a": ones(1)}.values(), "dict_values: output"),
        ({"a": ones(1)}.items(), "dict_items: output"),
        (collections.ChainMap({"a": ones(1)}), "ChainMap: output"),
        (MappingProxyType({"a": ones(1)}), "mappingproxy: output"),
        (functools.partial(torch.add, ones(1)), "partial: output"),
        ((lambda x: lambda: x)(ones(1)), "function: output"),
    ],
)
def test_a_tensor_in_another_object_is_refused(value, name):
    with pytest.raises(Error, match=f"in an object of type {name}.*registerCustomArgParser"):
        OutputSpec(value)


@pytest.mark.parametrize(
    "make",
    [
        lambda x: (y for y in x),
        lambda x: map(str, x),
        lambda x: zip(x, x, strict=True),
        enumerate,
        iter,
        lambda x: {"a": (1, reversed(x))},
    ],
)
@pytest.mark.parametrize("items", [[1, 2], [ones(1)]])
def test_an_iterator_is_refused(make, items):
    with pytest.raises(Error, match=r"can be read only once.*Return its items in a tuple or list"):
        OutputSpec(make(items))


def test_objects_without_tensors_are_constants():
    values = [{1, 2}, {"a": 1}.keys(), range(3), (lambda x: lambda: x)(1), torch.nn.Linear(2, 2)]
    assert OutputSpec(values).unflatten([]) == values


def test_a_model_returns_a_dataclass():
    class Model(torch.nn.Module):
        def forward(self, x):
            return Pair(x + 1, {"double": x * 2, "name": "a"})

    x = ones(2)
    for _ in range(2):
        result = poptorch.inferenceModel(Model())(x)
        assert type(result) is Pair
        torch.testing.assert_close(result.first, x + 1)
        torch.testing.assert_close(result.second["double"], x * 2)
        assert result.second["name"] == "a"
        x = x * 3


def test_a_saved_model_that_returns_a_dataclass_says_why_it_cannot_be_loaded(tmp_path):
    class Model(torch.nn.Module):
        def forward(self, x):
            return Pair(x + 1)

    model = poptorch.inferenceModel(Model())
    model.compileAndExport(str(tmp_path / "model.poptorch"), ones(2))
    with pytest.raises(Error, match="Pair"):
        poptorch.load(str(tmp_path / "model.poptorch"))
