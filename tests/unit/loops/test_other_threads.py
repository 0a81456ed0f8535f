"""While one thread traces the body of a loop, other threads work as usual."""

import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch

SECONDS = 20.0

pytestmark = pytest.mark.timeout(60, method="thread")


def test_models_and_optimizers_of_other_threads_do_not_concern_the_trace():
    is_traced, has_stepped = threading.Event(), threading.Event()
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    failures = []

    def train_eagerly():
        try:
            assert is_traced.wait(SECONDS)
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        except BaseException as error:
            failures.append(error)
        finally:
            has_stepped.set()

    @poptorch.function
    def run():
        def body(x):
            is_traced.set()
            assert has_stepped.wait(SECONDS)
            return x + 1

        return poptorch.repeat(3, body, 0.0)

    before = model.weight.detach().clone()
    other = threading.Thread(target=train_eagerly)
    other.start()
    result = run()
    other.join(SECONDS)
    assert not failures
    assert result.item() == 3
    torch.testing.assert_close(model.weight.detach(), before - 0.1)


def test_a_function_runs_while_another_trains_other_weights():
    def make(num_iterations):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def body():
            optimizer.zero_grad()
            model(torch.ones(1, 2, device="ipu")).sum().backward()
            optimizer.step()

        return model, poptorch.function(lambda: poptorch.repeat(num_iterations, body))

    (_, endless), (model, known) = make(2**30), make(1)
    known()
    errors = []

    def run():
        try:
            endless()
        except poptorch.Error as error:  # the run is stopped
            errors.append(error)

    other = threading.Thread(target=run)
    other.start()
    try:
        while not any(program.num_iterations for program in endless.programs):
            assert other.is_alive()
        before = model.weight.detach().clone()
        known()
        new_model, new = make(2)
        weight = new_model.weight.detach().clone()
        new()
        torch.testing.assert_close(model.weight.detach(), before - 1e-3)
        torch.testing.assert_close(new_model.weight.detach(), weight - 2e-3)
        assert other.is_alive()
    finally:
        endless.stop()
        other.join(SECONDS)
    assert "stopped" in str(errors[0])
