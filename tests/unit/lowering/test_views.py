"""Operators that only look at memory cost nothing; if a view is impossible, they copy once."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import popsim_torch as poptorch
from popsim_torch.ir import Graph, Phase, TensorKind
from popsim_torch.lowering.emit.builder import Builder, Place
from popsim_torch.lowering.rules.views import is_view, lower_view

aten = torch.ops.aten
PLACE = Place(Phase.FORWARD, 0, "view")


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def compile_function(function, *inputs):
    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    model = poptorch.inferenceModel(Function(function), options)
    model.compile(*inputs)
    return model


def op_kinds(model):
    """Return the kinds of the program's ops, without those that copy to the host."""
    return [op.kind for op in model.compiled.host_program.graph.ops if op.kind != "anchor"]


def nodes_of(function, *inputs):
    """Return the ATen nodes of a function."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return [n for n in graph.nodes if n.op == "call_function"]


X = torch.arange(24.0).view(2, 3, 4)

VIEWS = {
    "view": lambda x: x.view(6, 4),
    "reshape": lambda x: x.reshape(-1),
    "flatten": lambda x: x.flatten(1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "transpose": lambda x: x.transpose(0, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "t": lambda x: x[0].t(),
    "slice": lambda x: x[:, 1:],
    "steps": lambda x: x[:, ::2, 1::2],
    "select": lambda x: x[1],
    "negative index": lambda x: x[:, -1],
    "expand": lambda x: x[:, :1].expand(2, 5, 4),
    "narrow": lambda x: x.narrow(2, 1, 2),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "unfold": lambda x: x.unfold(2, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1), 3),
    "view of a slice": lambda x: x[:, 1:2].view(2, 4),
    "slices of slices": lambda x: x[1][1:][:, 2],
    "detach": lambda x: x.detach(),
    "alias": lambda x: x.view_as(x),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "same type": lambda x: x.to(torch.float32),
}

SEVERAL = {
    "split": lambda x: x.split(1, 1),
    "uneven split": lambda x: x.split([1, 3], 2),
    "chunk": lambda x: x.chunk(2, 2),
    "unbind": lambda x: x.unbind(1),
}


@pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
def test_views_have_the_values_of_eager(function):
    assert torch.equal(compile_function(function, X)(X), function(X))


@pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
def test_views_need_no_op(function):
    assert op_kinds(compile_function(function, X)) == []


@pytest.mark.parametrize("function", SEVERAL.values(), ids=SEVERAL)
def test_operators_with_several_views(function):
    model = compile_function(function, X)
    assert op_kinds(model) == []
    for actual, expected in zip(model(X), function(X), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("function", VIEWS.values(), ids=VIEWS)
def test_views_of_computed_tensors(function):
    def computed(x):
        return function(torch.cumsum(x, 0)) * 2

    torch.testing.assert_close(compile_function(computed, X)(X), computed(X))


COPIES = {
    "reshape of a transposed tensor": lambda x: x.transpose(1, 2).reshape(-1),
    "reshape of an expanded tensor": lambda x: x[:, :1].expand(2, 3, 4).reshape(6, 4),
    "flatten of a slice": lambda x: x[:, :, 1:].flatten(),
}


@pytest.mark.parametrize("function", COPIES.values(), ids=COPIES)
def test_what_is_no_view_is_copied_once(function):
    model = compile_function(function, X)
    assert op_kinds(model).count("copy") == 1
    assert torch.equal(model(X), function(X))


def test_a_copy_is_shared():
    def function(x):
        flat = x.transpose(1, 2).reshape(-1)
        other = x.transpose(1, 2).reshape(4, 6)
        return flat + 1, other * 2

    model = compile_function(function, X)
    for actual, expected in zip(model(X), function(X), strict=True):
        assert torch.equal(actual, expected)


def test_as_strided_of_a_view_counts_in_the_whole_memory():
    def function(x):
        return x[1].as_strided((2, 2), (4, 1), 12)

    assert torch.equal(compile_function(function, X)(X), function(X))


def test_as_strided_of_a_transposed_result():
    def function(x):
        y = torch.cumsum(x, 0).transpose(0, 2)
        return y.as_strided((3, 2), (2, 1), 1)

    assert torch.equal(compile_function(function, X)(X), function(X))


def test_writing_through_views_inside_forward():
    def function(x):
        x = x.clone()
        x.view(-1)[::3] = -1
        x[0].t()[1].mul_(2)
        x[:, 1:].unbind(2)[0].zero_()
        return x

    assert torch.equal(compile_function(function, X)(X), function(X))


def test_a_view_keeps_the_phase_of_nothing():
    """Views of parameters and constants need no setup ops either."""

    class Holds(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            return x @ self.w.t()

    options = poptorch.Options()
    options.showCompilationProgressBar(False)
    model = poptorch.inferenceModel(Holds(), options)
    model.compile(torch.ones(1, 3))
    assert op_kinds(model) == ["matmul"]


# The functions themselves


@pytest.mark.parametrize(
    "function, answer",
    [
        (lambda x: x.view(24), True),
        (lambda x: x.transpose(0, 1), True),
        (lambda x: x[0], True),
        (lambda x: x.clone(), True),
        (lambda x: x.detach(), True),
        (lambda x: aten._to_copy(x, dtype=torch.float32), True),
        (lambda x: aten._to_copy(x, dtype=torch.float16), False),
        (lambda x: x.split(1), True),
        (lambda x: x + 1, False),
        (lambda x: torch.cat([x, x]), False),
        (lambda x: x.add_(1), False),
        (lambda x: x.sum(), False),
    ],
)
def test_is_view(function, answer):
    assert is_view(nodes_of(function, X)[0]) == answer


@pytest.fixture
def lowered():
    """Lower the views in a function of one input; return the graph and the last value."""

    def lower(function, x):
        module = make_fx(function, tracing_mode="fake")(x)
        graph = Graph()
        builder = Builder(graph, set(module.graph.nodes), [])
        for node in module.graph.nodes:
            if node.op == "placeholder":
                builder.values[node] = graph.add_tensor(TensorKind.INPUT, x.dtype, x.shape)
            elif node.op == "call_function" and is_view(node):
                builder.values[node] = value = lower_view(builder, node, PLACE)
        return graph, value

    return lower


def test_a_view_points_into_the_memory_of_its_root(lowered):
    graph, view = lowered(lambda x: x[1][1:].t(), X)
    assert view.kind == TensorKind.VIEW
    assert graph.root(view) is graph.tensors[0]
    assert (view.shape, view.strides, view.offset) == ((4, 2), (1, 4), 16)
    assert graph.ops == []


def test_an_impossible_view_becomes_a_view_of_a_copy(lowered):
    graph, view = lowered(lambda x: x.transpose(0, 2).reshape(24), X)
    (op,) = graph.ops
    assert op.kind == "copy"
    assert graph.root(view).kind == TensorKind.VALUE
    assert view.shape == (24,)


def test_every_part_of_a_split_has_an_offset_of_its_own(lowered):
    graph, parts = lowered(lambda x: x.split(2, 2)[1], X)
    assert graph.ops == []
    assert [part.offset for part in parts] == [0, 2]
    assert {part.shape for part in parts} == {(2, 3, 2)}
