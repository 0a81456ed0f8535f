"""Mistakes with ``poptorch.function``, ``repeat`` and ``while_loop``: messages and lines."""

import copy
import re

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import Error, UsageTypeError

MODEL = nn.Linear(1, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)
ONE = torch.ones(1)


def repeated(body, n=3, inputs=(), infeed=None, **settings):
    """Run a loop in its own function."""

    @poptorch.function
    def run():
        return poptorch.repeat(n, body, inputs, infeed, **settings)

    return run()


def looped(condition, body, inputs=ONE, infeed=None, **settings):
    """The same with a condition."""

    @poptorch.function
    def run():
        return poptorch.while_loop(condition, body, inputs, infeed, **settings)

    return run()


def test_an_error_leaves_the_function_usable():
    iterations = [ONE]

    @poptorch.function
    def run():
        return poptorch.repeat(2, lambda x: x if iterations else x.sum(), ONE)

    iterations.clear()
    with pytest.raises(UsageTypeError):
        run()
    iterations.append(ONE)
    assert run().tolist() == [1]


# What goes in


@pytest.mark.parametrize("n", [-1, 2.5, True, "3", ONE], ids=str)
def test_the_number_of_iterations(n):
    with pytest.raises(Error, match=r"repeat: n must be an integer of 0 or more, got "):
        repeated(lambda: None, n)


def test_the_largest_number_of_iterations():
    with pytest.raises(Error, match="maximum_iterations must be an integer of 0 or more, got -1"):
        looped(lambda x: x > 0, lambda x: x, maximum_iterations=-1)


@pytest.mark.parametrize("count", [0, 1.5])
def test_the_accumulation(count):
    with pytest.raises(Error, match="gradient_accumulation must be an integer of 1 or more"):
        repeated(lambda: None, gradient_accumulation=count)


def test_iterations_that_leave_gradients_over():
    with pytest.raises(
        Error,
        match=r"n = 10 is not a multiple of gradient_accumulation = 4\. The nearest multiples are "
        r"8 and 12\.",
    ):
        repeated(lambda: None, 10, gradient_accumulation=4)


@pytest.mark.parametrize(
    ("inputs", "text"),
    [
        (["text"], "repeat: inputs[0] is a str. Carried values are tensors or numbers."),
        ((1, [2]), "repeat: inputs[1] is a list. Carried values are tensors or numbers."),
        (torch.zeros(1, dtype=torch.uint16), "inputs[0] has the dtype uint16, which"),
    ],
    ids=["text", "list", "complex"],
)
def test_what_cannot_be_carried(inputs, text):
    with pytest.raises(UsageTypeError, match=re.escape(text)):
        repeated(lambda *values: values, inputs=inputs)


def test_a_condition_needs_values():
    with pytest.raises(UsageTypeError, match="inputs is empty, so the condition could never"):
        looped(lambda: True, lambda: None, ())


def test_a_dataset_in_the_place_of_a_queue():
    with pytest.raises(
        UsageTypeError, match=r"infeed is a list\. Pass poptorch\.InfeedQueue\(dataset\)\."
    ):
        repeated(lambda x: None, infeed=[ONE])


# What bodies take and return


def test_the_arguments_of_a_body_are_counted():
    with poptorch.InfeedQueue([(ONE, ONE)] * 3) as infeed, pytest.raises(UsageTypeError) as caught:
        repeated(lambda c, x: c, inputs=ONE, infeed=infeed)
    assert str(caught.value) == (
        "repeat: the body gets 1 carried value(s) and 2 input(s) from the infeed queue, and it "
        "takes (c, x): too many positional arguments."
    )


def test_the_arguments_of_a_dictionary_are_named():
    with (
        poptorch.InfeedQueue([{"image": ONE, "label": ONE}] * 3) as infeed,
        pytest.raises(UsageTypeError) as caught,
    ):
        repeated(lambda image: None, infeed=infeed)
    assert str(caught.value) == (
        "repeat: the body gets 0 carried value(s) and 2 input(s) from the infeed queue (image, "
        "label), and it takes (image): got an unexpected keyword argument 'label'."
    )


def test_a_condition_is_not_shown_the_element():
    with poptorch.InfeedQueue([ONE] * 3) as infeed, pytest.raises(UsageTypeError) as caught:
        looped(lambda c, x: c < 3, lambda c, x: c + x, infeed=infeed)
    assert str(caught.value) == (
        "while_loop: the condition gets 1 carried value(s), and no element of the infeed queue, "
        "and it takes (c, x): missing a required argument: 'x'."
    )


@pytest.mark.parametrize(
    ("returned", "listed"),
    [
        (lambda x: x.sum(), "[float32[]]"),
        (lambda x: x.long(), "[int32[2]]"),
        (lambda x: (x, x), "[float32[2], float32[2]]"),
        (lambda x: None, "[]"),
        (lambda x: "text", "[str]"),
        (lambda x: 1, "[int32[]]"),
    ],
    ids=["shape", "type", "one more", "nothing", "text", "number"],
)
def test_other_values_than_those_carried(returned, listed):
    with pytest.raises(UsageTypeError) as caught:
        repeated(returned, inputs=torch.ones(2))
    assert str(caught.value) == (
        f"repeat: the body returns {listed} and carries [float32[2]]. It must return as many "
        "values as it carries, with the same shapes and dtypes."
    )


def test_values_where_none_are_carried():
    with pytest.raises(UsageTypeError, match=r"returns \[float32\[1\]\] and carries \[\]") as told:
        repeated(lambda: ONE)
    assert "To see values of every iteration, pass them to OutfeedQueue.enqueue" in str(told.value)


def test_an_operation_in_front_of_a_value():
    queue = poptorch.OutfeedQueue()
    with pytest.raises(UsageTypeError, match=r"an operation \(None\) before a tensor"):
        repeated(lambda x: (queue.enqueue(x), x), inputs=ONE)
    assert repeated(lambda x: (x, queue.enqueue(x)), inputs=ONE).tolist() == [1]


@pytest.mark.parametrize(
    ("asked", "got"),
    [
        (lambda x: x > 0, "bool[3]"),
        (lambda x: None, "NoneType"),
        (lambda x: (x[0] > 0,), "tuple"),
    ],
    ids=["three", "none", "tuple"],
)
def test_a_condition_says_one_thing(asked, got):
    with pytest.raises(UsageTypeError, match="must return one boolean, got ") as caught:
        looped(asked, lambda x: x, torch.ones(3))
    assert str(caught.value).endswith(f"got {got}.")


@pytest.mark.parametrize("holds", [True, torch.tensor(True)], ids=["bool", "tensor"])
def test_a_condition_that_always_holds(holds):
    """A condition whose value is the same in each iteration is no mistake."""
    assert looped(lambda x: holds, lambda x: x + 1, maximum_iterations=4).tolist() == [5]


# Where loops stand


def test_outside_of_a_function():
    with pytest.raises(Error, match=r"it is called outside of a poptorch\.function"):
        poptorch.repeat(1, lambda: None)


def test_a_loop_in_a_loop():
    with pytest.raises(
        Error, match=r"at .*test_device_loops\.py:\d+ in the body of another loop.*for_loop"
    ):
        repeated(lambda x: poptorch.repeat(2, lambda y: y, x), inputs=ONE)


def test_a_function_without_a_loop():
    @poptorch.function
    def nothing(x):
        return x

    with pytest.raises(Error, match="nothing' has no loop, so the device has nothing to do"):
        nothing(ONE)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (lambda x, r: x.sum().item(), r"'item' at {line} turns values that differ"),
        (lambda x, r: 1 if r > 0 else 0, r"'__bool__' at {line} .*torch\.where"),
        (lambda x, r: float(MODEL.weight.detach()), r"'__float__' at {line} turns values"),
        (lambda x, r: str(r), r"'__repr__' at {line} turns values|'__format__'"),
        (lambda x, r: r.numpy(), r"'numpy' at {line} turns values"),
        (lambda x, r: torch.rand(2).tolist(), r"'tolist' at {line} turns values"),
        (lambda x, r: torch.zeros(1).add_(x).tolist(), r"'tolist' at {line} turns values"),
        (lambda x, r: MODEL(r).sum().backward(), r"'backward' is called at {line} outside of a"),
        (lambda x, r: OPTIMIZER.step(), r"SGD\.step\(\) is called at {line} outside of a loop"),
        (lambda x, r: torch.vmap(torch.sin)(r), r"'sin' is called at {line} .*torch\.func"),
        (lambda x, r: copy.deepcopy(r), r"'__deepcopy__' is called at .*tensor\.clone"),
        (lambda x, r: x[: r.long()], r"a slice has tensors as bounds"),
    ],
)
def test_values_outside_of_a_loop(code, message):
    @poptorch.function
    def run(x):
        code(x, poptorch.repeat(2, lambda y: y, x))

    line = r".*test_device_loops\.py:\d+"
    with pytest.raises(Error, match=message.replace("{line}", line)):
        run(ONE)


def test_gradients_through_what_was_computed_outside():
    @poptorch.function
    def run(x):
        doubled = MODEL.weight * 2

        def body():
            OPTIMIZER.zero_grad()
            (x @ doubled).sum().backward()
            OPTIMIZER.step()

        poptorch.repeat(2, body)

    with pytest.raises(Error, match=r"test_device_loops\.py:\d+: the loss depends on a weight"):
        run(ONE)


def test_what_is_no_function_or_no_options():
    with pytest.raises(Error, match=r"poptorch\.function: needs a function, got int\."):
        poptorch.function(3)
    with pytest.raises(Error, match=r"options must be a poptorch\.Options, got dict\."):
        poptorch.function(options={})(lambda: None)


# What else is done in a body


@pytest.mark.parametrize(
    "read",
    [
        poptorch.OutfeedQueue.dequeue,
        poptorch.OutfeedQueue.poll,
        poptorch.OutfeedQueue.get,
        poptorch.OutfeedQueue.drain,
        list,
        lambda queue: list(queue.follow()),
    ],
    ids=["dequeue", "poll", "get", "drain", "iteration", "follow"],
)
@pytest.mark.timeout(60, method="thread")
def test_reading_a_queue(read):
    queue = poptorch.OutfeedQueue()

    def body(x):
        queue.enqueue(x)
        read(queue)
        return x

    with pytest.raises(Error, match="is read in the body of a loop, or in forward"):
        repeated(body, inputs=ONE)


def test_calling_an_executor():
    model = poptorch.inferenceModel(nn.Linear(1, 1))

    def body(x):
        return model(x)

    with pytest.raises(Error, match=r"is called in the body of a loop.*Call the module itself"):
        repeated(body, inputs=torch.ones(1, 1))


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda x: x.sum().item(), r"aten::item is only supported in eager mode"),
        (lambda x: 1 if x.sum() > 0 else 0, r"Write torch\.where\(condition, a, b\)"),
        (lambda x: x.numpy(), r"Illegal move to CPU \(Tensor\.numpy\)"),
        (lambda x: x.cpu(), r"Illegal move to CPU \(Tensor\.cpu\)"),
    ],
    ids=["item", "if", "numpy", "cpu"],
)
def test_values_are_not_there_while_a_body_is_traced(use, text):
    with pytest.raises(Error, match=text) as caught:
        repeated(use, inputs=ONE)
    assert re.search(r"test_device_loops\.py:\d+", str(caught.value))


@pytest.mark.parametrize("read", [torch.Tensor.item, float, bool])
def test_values_that_a_body_has_kept_in_a_list(read):
    kept, queue = [], poptorch.OutfeedQueue()

    def body(x):
        kept.append(x.sum())
        queue.enqueue(x.sum())
        return x + 1

    assert repeated(body, inputs=ONE).tolist() == [4]
    with pytest.raises(Error, match=r"was made in the body of a loop.*OutfeedQueue\.enqueue"):
        read(kept[0])
    assert queue.dequeue().tolist() == [1, 2, 3]
