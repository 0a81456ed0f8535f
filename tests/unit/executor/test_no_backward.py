"""Calling ``backward()`` on a model's result."""

import pickle

import pytest
import torch

import popsim_torch as poptorch
from tests.unit.executor.nets import Net, batch, infer, train


@pytest.mark.parametrize("make", [train, infer])
def test_results_have_no_backward(make):
    out, loss = make(Net())(*batch())
    for result in (out, loss):
        assert type(result) is torch.Tensor
        assert not result.requires_grad
        assert not vars(result)
        with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
            result.backward(torch.ones_like(result))


def test_other_tensors_fail_as_before():
    train(Net())
    with pytest.raises(RuntimeError, match=r"^element 0 of tensors does not require grad"):
        torch.ones(1).backward()
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="only for scalar outputs") as caught:
        (x * 2).backward()
    assert not isinstance(caught.value, poptorch.Error)


def test_backward_works_as_before():
    train(Net())
    x = torch.ones(2, requires_grad=True)
    y = (x * 2).sum()
    y.backward(retain_graph=True)
    y.backward(inputs=[x])
    assert x.grad.tolist() == [4.0, 4.0]


def test_wrapping_many_models_wraps_backward_once():
    train(Net())
    once = torch.Tensor.backward
    train(Net())
    assert torch.Tensor.backward is once


def test_results_can_be_saved():
    out, _ = infer(Net())(*batch())
    assert torch.equal(pickle.loads(pickle.dumps(out)), out)
