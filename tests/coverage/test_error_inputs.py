"""Calls that PyTorch's databases say are wrong: refused on the device, too, with the line."""

import re
import traceback
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import InternalError
from tests.coverage.call import Call
from tests.coverage.cases import MODULES, OPS

_LINE = re.compile(r"tests/coverage/\w+\.py:\d+")
# The device holds these as float32 and complex64, so no dtypes can disagree.
_WIDE = {torch.float64, torch.complex128}


def op_calls() -> Iterator[tuple[str, Call]]:
    for name, op in OPS.items():
        if op.error_inputs_func is None:
            continue
        for i, wrong in enumerate(op.error_inputs("cpu")):
            sample = wrong.sample_input
            structure = ((sample.input, *sample.args), dict(sample.kwargs))
            yield f"{name} {i}", Call(op.op, structure)


def module_calls() -> Iterator[tuple[str, Call]]:
    for name, info in MODULES.items():
        if info.module_error_inputs_func is None:
            continue
        settings = {"device": "cpu", "dtype": torch.float32, "requires_grad": False}
        wrong_inputs = info.module_error_inputs_func(info, **settings, training=False)
        for i, wrong in enumerate(wrong_inputs):
            made = wrong.module_error_input.constructor_input
            given = wrong.module_error_input.forward_input
            try:
                module = info.module_cls(*made.args, **made.kwargs).eval()
            except Exception:
                continue  # nothing reaches a model
            if given is not None:
                structure = (tuple(given.args), dict(given.kwargs))
                yield f"{name} {i}", Call(module, structure, module=module)


class Wrong(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.module = call.module
        self.call = [call]

    def forward(self, *tensors):
        return self.call[0](tensors)


def refusal(call: Call) -> Exception | None:
    """Return the error of eager PyTorch; None if it accepts the call, or if it says nothing."""
    if call.out_of_scope or any(value.dtype in _WIDE for value in call.given):
        return None
    try:
        with torch.no_grad():  # (each input of a model has memory of its own)
            call([value.detach().clone() for value in call.given])
    except Exception as error:
        return error
    return None


def problem(call: Call, expected: Exception) -> str:
    """Return what is wrong with the answer to a call that eager PyTorch refuses."""
    model = poptorch.inferenceModel(Wrong(call).eval())
    try:
        model(*(value.detach() for value in call.given))
    except InternalError as error:
        return f"InternalError: {error}"
    except (poptorch.Error, type(expected)) as error:
        # Inputs are checked before forward is called.
        is_of_input = "Zero-sized tensors are unsupported: input" in str(error)
        shown = "".join(traceback.format_exception(error)).replace('", line ', ":")
        return "" if is_of_input or _LINE.search(shown) else f"no line: {error}"
    except Exception as error:
        return f"{type(error).__name__} instead of {type(expected).__name__}: {error}"
    finally:
        model.destroy()
    return f"accepted: {expected}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("calls", [op_calls, module_calls])
def test_what_eager_pytorch_refuses_is_refused(calls):
    problems, refused = [], 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, call in calls():
            expected = refusal(call)
            if expected is None:
                continue
            refused += 1
            if found := problem(call, expected):
                problems.append(f"{name}: {found}")
    assert not problems
    assert refused > 30


def test_a_call_that_is_accepted_is_seen():
    def call(x):
        return x + x[:, :2] if x.device.type == "cpu" else x + 1

    wrong = Call(call, ((torch.ones(2, 3),), {}))
    expected = refusal(wrong)
    assert isinstance(expected, RuntimeError)
    assert problem(wrong, expected).startswith("accepted: The size of tensor a")
