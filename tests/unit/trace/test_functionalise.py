"""Taking mutation out of a traced graph: same values, one final ``copy_`` per changed input."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from popsim_torch.private_torch.trees import tree_leaves
from popsim_torch.trace.graph.functionalise import functionalise_graph, is_mutating, replayed
from popsim_torch.trace.graph.pure_recorder import PureRecorder
from popsim_torch.trace.graph.rewritten import Unproven, rewrite

aten = torch.ops.aten


def graph_of(function, *inputs):
    """Trace a function on fake copies of the inputs."""
    return make_fx(function, tracing_mode="fake")(*[x.clone() for x in inputs])


def calls(module):
    return [node for node in module.graph.nodes if node.op == "call_function"]


def mutations(module):
    return [node for node in calls(module) if is_mutating(node)]


def inner_ops(module):
    """Return the targets of all nodes before the final copies."""
    return [node.target for node in calls(module) if node.target is not aten.copy_.default]


def add_in_place(x):
    x = x.clone()
    x.add_(1)
    return x * 2


def write_through_a_view(x):
    x = x.clone()
    x[0].fill_(5)
    x.view(-1)[1] = 7
    return x, x.sum()


def write_a_slice(x):
    x = x.clone()
    x[:, 1:3] = x[:, :2] * 2
    return x


def write_a_transposed_view(x):
    x = x.clone()
    x.t()[0].mul_(3)
    return x


def chain(x):
    return x.clone().relu_().add_(1).mul_(x)


def out_argument(x):
    result = torch.empty_like(x)
    torch.add(x, x, out=result)
    return result + 1


def masked(x):
    x = x.clone()
    x[x > 0] = 0.5
    return x


def index_put(x):
    x = x.clone()
    x[torch.tensor([0, 1]), torch.tensor([1, 0])] = 9.0
    return x


def overlapping_writes(x):
    x = x.clone()
    for i in range(3):
        x[:, i] = x[:, i] + x[:, i + 1]
    return x


def kept_view(x):
    x = x.clone()
    row = x[0]
    x.mul_(2)
    return row + 1, x


PURE = [
    add_in_place,
    write_through_a_view,
    write_a_slice,
    write_a_transposed_view,
    chain,
    out_argument,
    masked,
    index_put,
    overlapping_writes,
    kept_view,
]


@pytest.fixture
def x():
    return torch.randn(3, 4)


@pytest.mark.parametrize("function", PURE, ids=lambda f: f.__name__)
def test_values_are_unchanged(function, x):
    module, _ = functionalise_graph(graph_of(function, x), [])
    actual, expected = module(x.clone()), function(x.clone())
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("function", PURE, ids=lambda f: f.__name__)
def test_no_operator_changes_a_tensor(function, x):
    module, _ = functionalise_graph(graph_of(function, x), [])
    assert mutations(module) == []


@pytest.mark.parametrize("function", PURE, ids=lambda f: f.__name__)
def test_a_second_run_changes_nothing(function, x):
    once, _ = functionalise_graph(graph_of(function, x), [])
    twice, _ = functionalise_graph(once, [])
    assert twice is once


def running_statistics(x):
    mean, variance = torch.zeros(4), torch.ones(4)
    y = torch.nn.functional.batch_norm(x, mean, variance, training=True)
    return torch.relu_(y), mean, variance


def views_of_what_changes(x):
    x = x.clone()
    early = x.t()
    x.add_(1)
    late = x.view(4, 3)
    x.mul_(2)
    return early + late, x.unsqueeze(0), late.reshape(2, 6)


def random_numbers(x):
    return torch.empty_like(x).bernoulli_(0.5) * torch.empty_like(x).normal_()


def added_up(x):
    total = torch.zeros_like(x)
    for _ in range(3):
        total += x
        total.copy_(total * 2)
    return total


def numbers_and_names(module):
    """Return the nodes as text, with numbers for nodes, and with what later steps read."""
    numbers = {node: i for i, node in enumerate(module.graph.nodes)}
    return [
        (
            node.name,
            str(node.target),
            str(torch.fx.node.map_arg((node.args, node.kwargs), numbers.__getitem__)),
            [
                (one.shape, one.stride(), one.dtype)
                for one in tree_leaves(node.meta.get("val"))
                if isinstance(one, torch.Tensor)
            ],
            node.meta.get("custom"),
        )
        for node in numbers
    ]


@pytest.mark.parametrize(
    "function",
    [add_in_place, chain, running_statistics, views_of_what_changes, random_numbers, added_up],
    ids=lambda f: f.__name__,
)
def test_a_rewritten_graph_is_the_one_that_pytorch_makes(function, x):
    given = graph_of(function, x)
    watched = calls(given)[-3:]
    for i, node in enumerate(calls(given)):
        node.meta["custom"] = {"note": i}
    fake_mode = next(iter(given.graph.nodes)).meta["val"].fake_mode
    found = []
    for remove in (rewrite, replayed):
        with torch.no_grad(), preserve_node_meta():
            module, became = remove(given, watched, PureRecorder(fake_mode))
        module.graph.eliminate_dead_code()
        found.append((numbers_and_names(module), [became[one].name for one in watched]))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "function",
    [write_through_a_view, write_a_slice, out_argument, overlapping_writes],
    ids=lambda f: f.__name__,
)
def test_changes_through_views_are_left_to_pytorch(function, x):
    given = graph_of(function, x)
    fake_mode = next(iter(given.graph.nodes)).meta["val"].fake_mode
    with pytest.raises(Unproven):
        rewrite(given, [], PureRecorder(fake_mode))


def test_a_graph_without_mutation_is_returned_as_it_is(x):
    module = graph_of(lambda x: torch.tanh(x) * 2, x)
    nodes = calls(module)
    same, became = functionalise_graph(module, nodes)
    assert same is module
    assert became == {node: node for node in nodes}


def test_a_changed_input_has_one_copy_behind_everything(x):
    def function(x, y):
        x.add_(y)
        x.mul_(2)
        return x + y

    module, _ = functionalise_graph(graph_of(function, x, x), [])
    (write,) = mutations(module)
    assert write.target is aten.copy_.default
    first_input = next(n for n in module.graph.nodes if n.op == "placeholder")
    assert write.args[0] is first_input
    assert calls(module)[-1] is write


def test_a_changed_input_gets_the_eager_value(x):
    def function(x, y):
        x[:, 0] = y[:, 1]
        y.relu_()
        return (x * y).sum()

    module, _ = functionalise_graph(graph_of(function, x, x), [])
    ours, theirs = [[x.clone(), x.clone() - 0.5] for _ in range(2)]
    torch.testing.assert_close(module(*ours), function(*theirs), rtol=0, atol=0)
    for actual, expected in zip(ours, theirs, strict=True):
        assert torch.equal(actual, expected)


def test_two_changed_inputs_have_a_copy_each(x):
    def function(x, y):
        x.add_(1)
        y.add_(x)
        return x

    module, _ = functionalise_graph(graph_of(function, x, x), [])
    inputs = [n for n in module.graph.nodes if n.op == "placeholder"]
    assert {write.args[0] for write in mutations(module)} == set(inputs)


def test_an_input_read_before_and_after_its_change(x):
    def function(x):
        before = x * 1
        x.add_(1)
        return before, x * 1

    module, _ = functionalise_graph(graph_of(function, x), [])
    before, after = module(x.clone())
    assert torch.equal(before, x)
    assert torch.equal(after, x + 1)


CUTS = [
    (lambda x: x.split(2, 1), aten.split_copy.Tensor),
    (lambda x: x.split([1, 3], 1), aten.split_with_sizes_copy.default),
    (lambda x: x.unbind(1), aten.unbind_copy.int),
]


@pytest.mark.parametrize(("cut", "operator"), CUTS)
@pytest.mark.parametrize("cut_first", [True, False])
def test_parts_of_what_has_changed_are_taken_by_the_operator_called(x, cut, operator, cut_first):
    def function(x):
        x = x.clone()
        if cut_first:
            part = cut(x)[1]
            x.add_(1)
        else:
            x.add_(1)
            part = cut(x)[1]
        return part.t() * 2, part, x[:, :2]

    module, _ = functionalise_graph(graph_of(function, x), [])
    torch.testing.assert_close(module(x.clone()), function(x.clone()), rtol=0, atol=0)
    targets = inner_ops(module)
    assert operator in targets
    assert targets.count(aten.slice_copy.Tensor) == 1
    assert aten.select_copy.int not in targets


@pytest.mark.parametrize(("cut", "operator"), CUTS)
def test_a_part_that_is_changed_is_taken_by_the_operator_called(x, cut, operator):
    def function(x):
        x = x.clone()
        first, second, *_ = cut(x)
        first.mul_(2)
        return first * second.amax(), x

    module, _ = functionalise_graph(graph_of(function, x), [])
    torch.testing.assert_close(module(x.clone()), function(x.clone()), rtol=0, atol=0)
    assert operator in inner_ops(module)
    assert not {aten.slice_copy.Tensor, aten.select_copy.int} & set(inner_ops(module))


def test_watched_nodes_are_followed(x):
    def function(x):
        y = x.clone()
        y.add_(1)
        z = torch.tanh(y)
        z.mul_(2)
        return z

    module = graph_of(function, x)
    tanh = next(n for n in calls(module) if n.target is aten.tanh.default)
    clone = next(n for n in calls(module) if n.target is aten.clone.default)
    new, became = functionalise_graph(module, [tanh, clone])
    assert became[tanh].target is aten.tanh.default
    assert became[tanh] in new.graph.nodes
    assert became[clone].target is aten.clone.default


def test_a_watched_node_that_changes_its_argument(x):
    def function(x):
        y = x.clone()
        return y.relu_() + 1

    module = graph_of(function, x)
    relu = next(n for n in calls(module) if n.target is aten.relu_.default)
    _, became = functionalise_graph(module, [relu])
    assert became[relu].target is aten.relu.default


def test_metadata_is_kept(x):
    module = graph_of(write_a_slice, x)
    for node in calls(module):
        node.meta["custom"] = {"note": "kept"}
    new, _ = functionalise_graph(module, [])
    inner = [n for n in calls(new) if n.target is not aten.copy_.default]
    assert inner
    assert all(node.meta.get("custom") == {"note": "kept"} for node in inner)


def test_shapes_and_types_are_kept(x):
    module = graph_of(masked, x)
    new, _ = functionalise_graph(module, [])
    for node in calls(new):
        assert isinstance(node.meta["val"], torch.Tensor)
    given, made = (list(m.graph.nodes)[-1].args[0].meta["val"] for m in (module, new))
    assert (made.shape, made.dtype) == (given.shape, given.dtype)


def test_marks_of_a_profiler_are_left_out(x):
    def marked(x):
        with torch.profiler.record_function("outer"):
            x = x.clone()
            with torch.profiler.record_function("inner"):
                x[0] = 1
        return x

    functional, _ = functionalise_graph(graph_of(marked, x), [])
    assert [n for n in calls(functional) if "profiler" in str(n.target)] == []
    torch.testing.assert_close(functional(x), marked(x))


def test_the_given_graph_is_left_alone(x):
    module = graph_of(chain, x)
    before = str(module.graph)
    functionalise_graph(module, [])
    assert str(module.graph) == before


@pytest.mark.parametrize(
    "target, answer",
    [
        (aten.add_.Tensor, True),
        (aten.add.Tensor, False),
        (aten.copy_.default, True),
        (aten.add.out, True),
        (aten.view.default, False),
    ],
    ids=str,
)
def test_is_mutating(target, answer):
    graph = torch.fx.Graph()
    assert is_mutating(graph.call_function(target, ())) == answer


def test_other_nodes_are_not_mutating():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    assert not is_mutating(x)
    assert not is_mutating(graph.call_function(len, (x,)))
    assert not is_mutating(graph.call_method("add_", (x, 1)))


def test_marks_of_time_are_left_out():
    def function(x):
        with torch.profiler.record_function("mine"):
            y = x * 2
            y += 1
        return y

    x = torch.ones(3)
    module = graph_of(function, x)
    assert any(node.target.namespace == "profiler" for node in calls(module))
    pure, _ = functionalise_graph(module, [])
    assert not any(node.target.namespace == "profiler" for node in calls(pure))
    assert torch.equal(pure(x), function(x))
