"""destroy, and executors without references."""

import copy
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.unit.executor.nets import (
    LR,
    TOLERANCE,
    Net,
    assert_same_weights,
    batch,
    eager_step,
    infer,
    make_options,
    train,
)

X, Y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_an_executor_dropped_while_dirty_leaves_its_weights(optimizer):
    net = Net()
    before = net.fc1.weight.detach().clone()
    kind = getattr(poptorch.optim, optimizer)
    own = kind(net.parameters(), lr=LR)
    model = train(net, optimizer=own)
    model(*batch())
    expected = {k: v.clone() for k, v in copy.deepcopy(net.state_dict()).items()}
    model(*batch())
    model.copyWeightsToHost()
    model(*batch())
    del model
    gc.collect()
    assert type(net) is Net
    assert not torch.equal(net.fc1.weight, before)
    assert not torch.equal(net.fc1.weight, expected["fc1.weight"])
    own.state_dict()
    train(net)(*batch())


def test_a_dropped_executor_leaves_what_it_trained():
    net = Net()
    twin = copy.deepcopy(net)
    x, y = batch()
    train(net)(x, y)
    gc.collect()
    eager_step(twin, torch.optim.SGD(twin.parameters(), lr=LR), x, y)
    assert_same_weights(net, twin)


def test_a_dropped_inference_executor_does_not_matter():
    net = Net()
    x, y = batch()
    inference = infer(net)
    inference(x)
    training = train(net)
    del inference
    gc.collect()
    training(x, y)
    torch.testing.assert_close(infer(net)(x), net(x).detach(), **TOLERANCE)


def test_executors_are_freed():
    net = Net()
    model = train(net)
    model(*batch())
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("destroy", [True, False])
def test_parameters_are_freed_with_their_model(destroy):
    def use():
        net = Net()
        model = train(net)
        model(*batch())
        if destroy:
            model.destroy()
        return [weakref.ref(parameter) for parameter in net.parameters()]

    alive = use()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


def test_compiling_in_threads():
    nets = [Net() for _ in range(4)]
    x, y = batch()
    results = {}

    def use(position):
        try:
            results[position] = train(nets[position])(x, y)[1]
        except Exception as error:
            results[position] = error

    expected = [net(x, y)[1].detach() for net in nets]
    threads = [threading.Thread(target=use, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for position, loss in enumerate(expected):
        torch.testing.assert_close(results[position], loss, **TOLERANCE)


def test_a_running_executor_refuses_another_thread():
    model = infer(nn.Sequential(*[nn.Linear(256, 256) for _ in range(20)]), make_options(50))
    x = torch.randn(50 * 8, 256)
    expected = model(x)
    outcomes = []

    def use():
        try:
            outcomes.append(torch.equal(model(x), expected))
        except poptorch.Error as error:
            outcomes.append("already running" in str(error))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [True, True, True]
    assert torch.equal(model(x), expected)


def test_a_running_executor_keeps_its_device():
    model = infer(nn.Sequential(*[nn.Linear(256, 256) for _ in range(20)]), make_options(2000))
    x = torch.randn(2000, 256)
    model.compile(x)
    running = threading.Thread(target=lambda: model(x))
    running.start()
    while running.is_alive() and model.compiled.executable.num_micro_batches == 0:
        time.sleep(1e-4)  # the call has not begun yet
    with pytest.raises(poptorch.Error, match="running"):
        model.detachFromDevice()
    running.join()
    if model.isAttachedToDevice():
        model.detachFromDevice()
    model(x)


def test_a_deep_copy_of_a_trained_model_is_plain_and_current():
    net = Net()
    model = train(net)
    model(*batch())
    twin = copy.deepcopy(net)
    assert type(twin) is Net
    assert torch.equal(twin.fc1.weight, net.fc1.weight)
    model(*batch())
    assert not torch.equal(twin.fc1.weight, net.fc1.weight)


# --- Two executors of one model, one after the other --------------------------------


def successor():
    """Return a model, a destroyed executor that trained it, and a new one that trains it now."""
    net = Net()
    first = train(net)
    first(X, Y)
    first.destroy()
    second = train(net)
    second(X, Y)
    return net, first, second


@pytest.mark.parametrize("leave", ["drop", "destroy"])
def test_a_destroyed_executor_leaves_the_next_one_its_model(leave):
    net, first, second = successor()
    if leave == "destroy":
        first.destroy()
    del first
    gc.collect()
    before = net.fc1.weight.detach().clone()
    second(X, Y)
    assert not torch.equal(net.state_dict()["fc1.weight"], before)
    with pytest.raises(poptorch.Error, match="already been wrapped"):
        train(net)


def test_a_destroyed_executor_does_not_train_what_another_trains():
    net, first, second = successor()
    with pytest.raises(poptorch.Error, match="already wrapped"):
        first(X, Y)
    second.destroy()
    before = net.fc1.weight.detach().clone()
    first(X, Y)
    assert not torch.equal(net.fc1.weight, before)
    first.destroy()
    assert type(net) is Net


def test_an_executor_that_never_compiled_is_dropped_to_wrap_again():
    net = Net()
    first = train(net)
    first.destroy()
    with pytest.raises(poptorch.Error, match="del executor"):
        train(net)
    del first
    train(net)(X, Y)
