"""``CPU`` as an object, its arguments, and its behaviour outside compiled models."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.host_call import CallArguments
from tests.options import make_options


def pair(x, y=None, *, factor=1, **rest):
    return (x * factor if y is None else x * factor + y), list(rest)


@pytest.mark.parametrize(
    "args, kwargs", [((3,), {}), (("a",), {"factor": 2}), ((torch.ones(2), 1), {"other": {}})]
)
def test_outside_of_a_model_it_is_the_callable(args, kwargs):
    found, names = poptorch.CPU(pair, "pair")(*args, **kwargs)
    expected, others = pair(*args, **kwargs)
    assert names == others
    assert torch.equal(torch.as_tensor(found), expected) if torch.is_tensor(found) else True
    assert type(found) is type(expected)


def test_outside_of_a_model_the_result_is_handed_on():
    result = {"anything": object()}
    assert poptorch.CPU(lambda: result, "it")() is result


def test_outside_of_a_model_one_may_call_another():
    inner = poptorch.CPU(lambda x: x + 1, "inner")
    assert poptorch.CPU(lambda x: 2 * inner(x), "outer")(3) == 8


def test_parameters_of_a_module_are_frozen():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    cpu = poptorch.CPU(module, "module")
    assert not any(parameter.requires_grad for parameter in module.parameters())
    x = torch.randn(3, 2)
    assert not cpu(x).requires_grad


@pytest.mark.parametrize("function", [None, 3, "name", torch.ones(2)])
def test_what_cannot_be_called_is_refused(function):
    kind = type(function).__name__
    with pytest.raises(poptorch.Error, match=f"layer_to_call is a {kind}, which cannot be called"):
        poptorch.CPU(function, "it")


@pytest.mark.parametrize("name", [None, 3, b"it", ["it"]])
def test_an_id_that_is_no_string_is_refused(name):
    with pytest.raises(poptorch.Error, match="ID must be a string"):
        poptorch.CPU(abs, name)


def test_it_shows_what_it_is():
    assert repr(poptorch.CPU(nn.ReLU(), "it")) == "CPU(ReLU(), ID='it')"


def test_copies():
    cpu = poptorch.CPU(nn.Linear(2, 2), "it")
    x = torch.randn(3, 2)
    for other in (copy.copy(cpu), copy.deepcopy(cpu), pickle.loads(pickle.dumps(cpu))):
        assert torch.equal(other(x), cpu(x))


# --- Arguments ----------------------------------------------------------------


def test_arguments_are_taken_apart_and_rebuilt():
    x, y = torch.ones(2), torch.zeros(3)
    arguments = CallArguments.of(([x, 2], None), {"other": {"y": y}, "flag": True})
    assert [id(tensor) for tensor in arguments.tensors] == [id(x), id(y)]
    args, kwargs = arguments.rebuilt((y, x))
    (first, two), none = args
    assert first is y and two == 2 and none is None
    assert list(kwargs) == ["other", "flag"]
    assert kwargs["other"]["y"] is x and kwargs["flag"] is True
    assert not arguments.is_plain()
    assert CallArguments.of((x, y), {}).is_plain()
    assert CallArguments.of((), {}).is_plain()
    assert not CallArguments.of((x,), {"y": y}).is_plain()
    assert not CallArguments.of((x, None), {}).is_plain()
    assert not CallArguments.of(((x,),), {}).is_plain()


def test_arguments_in_a_program():
    seen = []

    def code(batch, *more, scale, mode="add"):
        seen.append((sorted(batch), len(more), scale, mode))
        total = batch["a"] * scale
        for tensor in more[0]:
            total = total + tensor
        return total

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu = poptorch.CPU(code, "code")

        def forward(self, x, y):
            return self.cpu({"a": x, "b": y}, [x, y], scale=0.5, mode="sum")

    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    for _ in range(2):
        assert torch.equal(poptorch.inferenceModel(Model(), make_options())(x, y), 1.5 * x + y)
    assert seen == 4 * [(["a", "b"], 1, 0.5, "sum")]


def count_calls(forward, *args):
    """Return results, and how often the code was called: to compile the model, then to run it."""
    counts = []

    def code(x, *flags):
        counts[-1] += 1
        return x + len(flags)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu = poptorch.CPU(code, "code")

        def forward(self, *args):
            return forward(self.cpu, *args)

    model = poptorch.inferenceModel(Model(), make_options())
    counts.append(0)
    model.compile(*args)
    counts.append(0)
    return model(*args), counts


def test_several_calls_of_one_object():
    """The callable is called once to compile; in a run, calls are never merged, even equal ones."""
    result, counts = count_calls(lambda cpu, x: cpu(x) + cpu(x) + cpu(cpu(x)), torch.ones(2))
    assert torch.equal(result, torch.full((2,), 3.0))
    assert counts == [1, 4]


def test_other_arguments_of_python_are_tried_out_as_well():
    result, counts = count_calls(lambda cpu, x: (cpu(x), cpu(x, 1), cpu(x, 1)), torch.ones(2))
    assert [value.tolist() for value in result] == [[1.0, 1.0], [2.0, 2.0], [2.0, 2.0]]
    assert counts == [2, 3]


def test_tensors_of_the_host_as_arguments():
    """Such tensors are constants; parameters have their values in the program."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
            self.table = torch.tensor([10.0, 20.0])
            self.cpu = poptorch.CPU(torch.add, "add")

        def forward(self):
            return self.cpu(self.weight, self.table)

    model = poptorch.inferenceModel(Model(), make_options())
    assert torch.equal(model(), torch.tensor([12.0, 23.0]))
    assert "host_call(weight" in str(model.program())


def test_a_call_without_tensors():
    numbers = iter(range(100))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu = poptorch.CPU(lambda: torch.tensor(next(numbers)), "next")

        def forward(self, x):
            return x + self.cpu()

    options = make_options(3).outputMode(poptorch.OutputMode.All)
    model = poptorch.inferenceModel(Model(), options)
    assert model(torch.zeros(3)).tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "code, kind",
    [
        (lambda x: x, torch.Tensor),
        (lambda x: [x], list),
        (lambda x: (x,), list),
        (lambda x: (x, x), list),
        (functools.partial(torch.max, dim=0), list),
    ],
)
def test_one_tensor_gives_a_tensor_and_several_a_list(code, kind):
    found = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cpu = poptorch.CPU(code, "code")

        def forward(self, x):
            found.append(self.cpu(x))
            return found[-1]

    x = torch.tensor([2.0, 1.0])
    result = poptorch.inferenceModel(Model(), make_options())(x)
    assert len(found) == 1 and isinstance(found[0], kind)
    expected = code(x)
    if kind is list:
        assert len(result) == len(expected)
        assert all(a.tolist() == b.tolist() for a, b in zip(result, expected, strict=True))
    else:
        assert torch.equal(result, expected)


def test_a_call_that_nobody_needs_is_left_out(caplog):
    def forward(cpu, x):
        cpu(x)
        unused = cpu(x) + 1  # noqa: F841
        return x * 2

    result, counts = count_calls(forward, torch.ones(2))
    assert torch.equal(result, torch.full((2,), 2.0))
    assert counts == [1, 0]
    warnings = [r.message for r in caplog.records if "is not in the program" in r.message]
    assert len(warnings) == 2
    assert all(f"poptorch.CPU 'code', called at {__file__}:" in text for text in warnings)
