"""What is known of an operator of the long tail before it runs: its results, or that it cannot."""

from collections.abc import Sequence

import pytest
import torch

from popsim_torch import ir
from popsim_torch.errors import Error, InternalError
from popsim_torch.ir import TensorArgument, TensorListArgument
from tests.ops.one_op import Type, infer_types, run_op


def results_of(operator: str, inputs: Sequence[torch.Tensor], *arguments) -> list[Type]:
    """Return the types of the results; tensors among the arguments are numbers of inputs."""
    graph = ir.Graph()
    operands = [
        graph.add_tensor(ir.TensorKind.VARIABLE, value.dtype, value.shape) for value in inputs
    ]
    name, _, overload = operator.partition(".")
    attributes = {
        "operator": f"aten::{name}",
        "overload": overload,
        "arguments": list(arguments),
    }
    graph.add_op("aten", operands, [], attributes, phase=ir.Phase.FORWARD, name="it")
    return infer_types(graph)


X, INDEX = torch.zeros(4, 6), torch.zeros(4, 2, dtype=torch.int64)
FIRST, SECOND = TensorArgument(0), TensorArgument(1)


# PyTorch has C++ for some, Python for others.
@pytest.mark.parametrize(
    "operator, inputs, arguments",
    [
        ("sort", [X], (FIRST, 1, True)),
        ("index_select", [X, INDEX[:, 0]], (FIRST, 1, SECOND)),
        ("gather", [X, INDEX], (FIRST, 1, SECOND)),
        ("topk", [X], (FIRST, 3, 1)),
        ("tril", [X], (FIRST,)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_types_are_those_of_eager_pytorch(operator, inputs, arguments):
    given = [inputs[a.input] if isinstance(a, TensorArgument) else a for a in arguments]
    expected = getattr(torch, operator)(*given)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)
    if operator == "topk":
        arguments = (*arguments, True, True)
    if operator == "gather":
        arguments = (*arguments, False)
    if operator == "tril":
        arguments = (*arguments, 0)
    for _ in range(2):
        types = results_of(operator, inputs, *arguments)
        assert types == [(value.dtype, tuple(value.shape)) for value in expected]


@pytest.mark.parametrize(
    "operator, inputs, arguments, problem",
    [
        ("gather", [X, INDEX[0]], (FIRST, 1, SECOND, False), "same number of dimensions"),
        ("gather", [X, X], (FIRST, 1, SECOND, False), "Expected dtype int32/int64"),
        ("topk", [X[0]], (FIRST, 3, 1, True, True), "[Dd]im(ension)? .*out of (range|bounds)"),
        ("stack", [X, X[0]], (TensorListArgument((0, 1)), 0), "expects each tensor to be equal"),
    ],
)
def test_what_it_does_not_take_is_refused(operator, inputs, arguments, problem):
    with pytest.raises(InternalError, match=f"aten::{operator} accepts its arguments: .*{problem}"):
        results_of(operator, inputs, *arguments)


def test_the_numbers_among_its_arguments_count():
    for size in (0.25, 0.2500001):
        expected = torch.arange(0.0, 1.0, size).shape
        types = results_of("arange.start_step", [], 0.0, 1.0, size, None, None, "cpu", None)
        assert types == [(torch.float32, tuple(expected))]


def test_what_only_a_run_tells():
    assert results_of("nonzero", [X], FIRST) == [None]


LOSS = ("nll_loss2d_backward", [(), (1, 3, 2, 2), (1, 2, 2)], [None, 1, -100, TensorArgument(3)])
POOL = ("adaptive_max_pool2d_backward", [(1, 1, 2, 2), (1, 1, 1, 3), (1, 1, 2, 2)], [])


def run_gradient(case, position):
    """Return the gradient of a loss or of max pooling whose last position is this one."""
    operator, (gradient, x, positions), arguments = case
    values = [torch.ones(gradient), torch.ones(x), torch.zeros(positions).long(), torch.tensor(1.0)]
    values[2].view(-1)[-1] = position
    arguments = [FIRST, SECOND, TensorArgument(2), *arguments]
    names = {"operator": f"aten::{operator}", "overload": "", "arguments": arguments}
    (result,) = run_op("aten", values, [(torch.float32, x)], **names)
    return result


@pytest.mark.parametrize("position", [-1, 3, 2**40, -(2**40)])
@pytest.mark.parametrize("case", [LOSS, POOL], ids=lambda case: case[0])
def test_positions_outside_of_the_tensor_are_an_error(case, position):
    """PyTorch leaves them to the forward, and writes wherever they point."""
    with pytest.raises(
        Error, match=f"aten::{case[0]}: position {position} is out of range: the size is 3"
    ):
        run_gradient(case, position)


def test_positions_inside_of_the_tensor_are_followed():
    assert run_gradient(POOL, 2).flatten().tolist() == [3, 0, 1]
    assert run_gradient(LOSS, 2)[0, :, 1, 1].tolist() == [0, 0, -1]
    assert run_gradient(LOSS, -100)[0, :, 1, 1].tolist() == [0, 0, 0]
