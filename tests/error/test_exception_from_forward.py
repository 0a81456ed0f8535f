"""Exceptions of the user's code keep their type, message and traceback."""

import traceback

import pytest
import torch


class Own(Exception):
    """An exception class that torch does not know."""

    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code


def raising(error):
    def mistake(net, x):
        net.fc(x)
        raise error

    return mistake


KINDS = {
    ValueError: ("ours",),
    KeyError: ("ours",),
    Own: (7, "ours"),
    ZeroDivisionError: ("ours",),
    AssertionError: ("ours",),
    NotImplementedError: ("ours",),
    RuntimeError: ("ours",),
    StopIteration: ("ours",),
    TypeError: ("ours",),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_type_is_kept(refused, kind):
    error = kind(*KINDS[kind])  # made here: the error keeps the frames, and these keep the executor
    caught = refused(raising(error), kind, "ours")
    assert caught is error
    assert type(caught) is kind


def test_the_traceback_leads_to_the_users_line(refused):
    error = refused(raising(Own(7, "ours")), Own, "ours")
    frames = traceback.extract_tb(error.__traceback__)
    assert frames[-1].name == "mistake"
    assert frames[-1].line == "raise error"


def test_a_shape_error_of_torch(refused):
    refused(
        lambda net, x: net.fc(x[:, :2]),
        RuntimeError,
        r"mat1 and mat2 shapes cannot be multiplied \(6x2 and 4x3\)",
    )


def test_an_attribute_error(refused):
    refused(lambda net, x: net.missing(x), AttributeError, "missing")


def test_keyboard_interrupt(refused):
    refused(raising(KeyboardInterrupt()), KeyboardInterrupt, "")


def test_random_state_and_grad_mode_are_left_alone(h):
    net = h.Net(raising(Own(7, "ours")))
    model = h.train(net)
    x, y = h.good_batch()
    # torch.compile turns these checks off for the rest of the process, if an earlier test used it.
    validates = torch.distributions.Distribution._validate_args
    with pytest.raises(Own):
        model(x, y)
    assert torch.is_grad_enabled()
    assert torch.distributions.Distribution._validate_args is validates
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.nn.functional.has_torch_function is torch.overrides.has_torch_function
