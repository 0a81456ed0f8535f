"""The op that calls code of the host, in programs without the code that usually surrounds it."""

from contextlib import nullcontext

import pytest
import torch

from popsim_torch import _native, ir
from popsim_torch.errors import Error, InternalError
from popsim_torch.passes.native_graph import to_native
from tests.ops.one_op import infer_types

RESULTS = {"dtypes": ["float32", "int64", "bool"], "ranks": [1, 0, 2], "sizes": [4, 2, 1]}


def call(phase=ir.Phase.FORWARD, **attributes):
    """Return a program with one call: two operands, the first transposed; three results."""
    graph = ir.Graph()
    x = graph.add_tensor(ir.TensorKind.INPUT, torch.float32, (2, 3))
    turned = graph.add_view(x, (3, 2), (1, 3), 0)
    y = graph.add_tensor(ir.TensorKind.INPUT, torch.int64, ())
    outputs = [
        graph.add_tensor(ir.TensorKind.VARIABLE, dtype, shape)
        for dtype, shape in ((torch.float32, (4,)), (torch.int64, ()), (torch.bool, (2, 1)))
    ]
    attributes = {"call": 7, "id": "it", "gradient": True, **RESULTS, **attributes}
    graph.add_op("host_call", [turned, y], outputs, attributes, phase=phase, name="it")
    return graph, [out.id for out in outputs]


def results():
    return [torch.arange(4.0), torch.tensor(-5), torch.tensor([[True], [False]])]


def executable(graph):
    config = _native.RunConfig(2, 1, False, "sequential")
    with _native.translated_errors():
        native = _native.Executable(to_native(graph), config)
        native.load()
    return native


def run(host):
    """Run two micro-batches; return the executable and the variables that have the results."""
    graph, ids = call()
    native = executable(graph)
    with _native.translated_errors():
        native.run([torch.arange(12.0).view(4, 3), torch.tensor([8, 9])], host)
    return [native.read(i) for i in ids]


def test_what_goes_to_the_host_and_what_comes_back():
    calls = []

    def host(*arguments):
        calls.append(arguments)
        return results()

    found = run(host)
    assert all(map(torch.equal, found, results()))
    numbers, gradients, tensors = zip(*calls, strict=True)
    assert (numbers, gradients) == ((7, 7), (True, True))
    for i, (x, y) in enumerate(tensors):
        assert torch.equal(x, torch.arange(12.0).view(2, 2, 3)[i].t())
        assert x.is_contiguous()
        assert y.dtype == torch.int64 and y.item() == 8 + i


def test_operands_are_copies_that_autograd_takes():
    kept = []

    def host(_number, _gradient, tensors):
        assert not torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
        x = tensors[0]
        kept.append(x.mul_(2).requires_grad_())
        (x * x).sum().backward()
        return results()

    inputs = [torch.arange(12.0), torch.tensor([8, 9])]
    graph, _ = call()
    native = executable(graph)
    native.run(inputs, host)
    assert torch.equal(inputs[0], torch.arange(12.0))
    assert not kept[0].is_inference()
    assert torch.equal(kept[0].grad, 4 * inputs[0][:6].view(2, 3).t())


def test_results_are_converted_and_rearranged():
    def host(*_):
        x, y, z = results()
        return [x.double().repeat_interleave(2)[::2], y.int(), z.t().contiguous().t()]

    assert all(map(torch.equal, run(host), results()))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda found: found[:2], "2 results instead of 3"),
        (lambda found: [*found, torch.ones(1)], "4 results instead of 3"),
        (
            lambda found: [found[0][:3], *found[1:]],
            r"result 0 has the shape \[3\] instead of \[4\]",
        ),
        (lambda found: [found[0], found[1][None], found[2]], "result 1 has the shape"),
    ],
)
def test_other_results_than_the_program_says_are_refused(change, message):
    with pytest.raises(InternalError, match=message):
        run(lambda *_: change(results()))


def test_what_is_no_list_of_tensors_is_refused():
    with pytest.raises(Error, match="while running 'it'"):
        run(lambda *_: 3)


def test_a_run_without_code_of_the_host():
    with pytest.raises(Error, match=r"while running 'it' \(host_call\): the program calls code"):
        run(None)


class Own(BaseException):
    """Not even an ``Exception``."""


def test_an_exception_ends_the_run_as_it_is():
    error, num_calls = Own("why"), []

    def host(*_):
        num_calls.append(1)
        if error is not None:
            raise error
        return results()

    graph, _ = call()
    native = executable(graph)
    inputs = [torch.arange(12.0), torch.tensor([8, 9])]
    for attempt in range(2):
        with pytest.raises(Own) as caught:
            native.run(inputs, host)
        assert caught.value is error
        assert caught.traceback[-1].name == "host"
        assert len(num_calls) == attempt + 1
    error = None
    native.run(inputs, host)
    assert len(num_calls) == 4
    assert len(native.profile(inputs, 2, host)) == 1
    assert len(num_calls) == 8


@pytest.mark.parametrize(
    "attributes, message",
    [
        ({"ranks": [1, 0]}, "each result has a rank"),
        ({"ranks": [1, 0, 3]}, "each axis has a size"),
        ({"sizes": [4, 2, 1, 1]}, "each size belongs to an axis"),
        ({"sizes": [4, 2]}, "each axis has a size"),
        ({"sizes": [5, 2, 1]}, "output 0"),
        ({"dtypes": ["float32", "int32", "bool"]}, "output 1"),
        ({"dtypes": ["float32", "int64", "complex128"]}, "dtypes"),
        ({"call": -1}, "call"),
    ],
)
def test_attributes_that_do_not_fit_are_refused(attributes, message):
    graph, _ = call(**attributes)
    with pytest.raises(InternalError, match=message):
        executable(graph)


@pytest.mark.parametrize("phase", ir.Phase)
def test_it_runs_with_micro_batches(phase):
    graph, _ = call(phase)
    runs = phase in (ir.Phase.FORWARD, ir.Phase.BACKWARD)
    with nullcontext() if runs else pytest.raises(InternalError, match="once for each micro-batch"):
        infer_types(graph)
