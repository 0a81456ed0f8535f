"""Functions that run before and after every compilation."""

import pytest
import torch

import popsim_torch as poptorch


@pytest.fixture
def hooked():
    """Register hooks that record their calls, for one test."""
    handles, seen = [], []

    def hook(register, name):
        handle = register(lambda: seen.append((name, poptorch.isRunningOnIpu())))
        handles.append(handle)
        return handle

    hook.seen = seen
    yield hook
    for handle in handles:
        handle.remove()


class Net(torch.nn.Module):
    def __init__(self, seen, error=None):
        super().__init__()
        self.seen, self.error = seen, error

    def forward(self, x):
        self.seen.append(("forward", poptorch.isRunningOnIpu()))
        if self.error is not None:
            raise self.error
        return x + 1


def wrapped(net):
    return poptorch.inferenceModel(net, poptorch.Options().showCompilationProgressBar(False))


def test_hooks_run_in_order_around_the_trace_and_not_in_later_calls(hooked):
    hooked(poptorch.registerPostCompileHook, "after")
    hooked(poptorch.registerPreCompileHook, "first")
    hooked(poptorch.registerPreCompileHook, "second")
    model = wrapped(Net(hooked.seen))
    model(torch.ones(2))
    model(torch.ones(2))
    names = ["first", "second", "forward", "after"]
    assert hooked.seen == [(name, True) for name in names]
    assert not poptorch.isRunningOnIpu()


def test_post_hooks_run_after_a_failed_trace(hooked):
    hooked(poptorch.registerPostCompileHook, "after")
    with pytest.raises(ValueError, match="no"):
        wrapped(Net(hooked.seen, ValueError("no")))(torch.ones(2))
    assert hooked.seen == [("forward", True), ("after", True)]


def test_a_removed_hook_is_not_called(hooked):
    hooked(poptorch.registerPreCompileHook, "first").remove()
    wrapped(Net(hooked.seen))(torch.ones(2))
    assert [name for name, _ in hooked.seen] == ["forward"]


@pytest.mark.parametrize(
    "register", [poptorch.registerPreCompileHook, poptorch.registerPostCompileHook]
)
def test_a_hook_must_be_callable(register):
    with pytest.raises(RuntimeError, match="must be callable, got a int"):
        register(3)


def test_an_error_of_a_hook_leaves_the_model_usable(hooked):
    handle = poptorch.registerPreCompileHook(lambda: 1 / 0)
    model = wrapped(Net(hooked.seen))
    try:
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2))
    finally:
        handle.remove()
    assert not poptorch.isRunningOnIpu()
    assert model(torch.ones(2)).tolist() == [2, 2]
