"""Host code that a program calls: its view, threads, signals, and uses of the executor."""

import copy
import gc
import pickle
import signal
import threading
import time
import weakref

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options
from tests.unit.executor import host_calls
from tests.unit.executor.host_calls import Net, X, infer

pytestmark = pytest.mark.timeout(120)


# --- What is around -----------------------------------------------------------


def test_the_host_sees_nothing_of_the_device():
    seen = []

    class Part(nn.Module):
        def forward(self, x):
            with poptorch.Block("inner", ipu_id=3):
                seen.append(poptorch.isRunningOnIpu())
                x = poptorch.ipu_print_tensor(x, "not printed")
            seen.append(type(x) is torch.Tensor and x.device.type == "cpu")
            seen.append(torch.ones(1).device.type == "cpu" and torch.range(0, 2).numel() == 3)
            seen.append(not torch.overrides._get_current_function_mode_stack())
            seen.append(bool((x == x).all()) and x.tolist() == x.numpy().tolist())
            return poptorch.nop(x)

    with pytest.warns(UserWarning, match="torch.range is deprecated"):
        model = infer(Part())
        model(X)
    assert seen == 2 * [False, True, True, True, True]


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_the_host_may_differentiate(context):
    def slope(x):
        x = x.clone().requires_grad_()
        x.square().sum().backward()
        assert not x.grad.is_inference()
        return x.grad

    model = infer(slope)
    with context():
        assert torch.equal(model(X), 4 * X + 1)
        assert torch.equal(model(X), 4 * X + 1)
    assert torch.equal(model(X), 4 * X + 1)


def test_tensors_are_kept_unchanged():
    kept = []

    def keep(x):
        kept.append((x, x.clone()))
        return x

    model = infer(keep, d=3)
    for _ in range(3):
        model(torch.randn(6))
    assert len(kept) == 10
    assert all(torch.equal(tensor, value) for tensor, value in kept)
    assert len({tensor.data_ptr() for tensor, _ in kept}) == 10


def test_data_of_a_callable_lasts():
    class Sum:
        def __init__(self):
            self.total = torch.zeros(2)
            self.num_calls = 0

        def __call__(self, x):
            self.num_calls += 1
            self.total += x
            return self.total

    total = Sum()
    model = infer(total, d=2)
    model(torch.ones(4))
    result = model(torch.ones(4))
    assert torch.equal(result, torch.tensor([7.0, 7.0, 9.0, 9.0]))
    assert total.num_calls == 5


def test_the_thread_of_the_caller_runs_it():
    threads = []

    def note(x):
        threads.append(threading.get_ident())
        return x

    model = infer(note)
    model(X)
    other = threading.Thread(target=model, args=(X,))
    other.start()
    other.join()
    assert threads == [threading.get_ident()] * 2 + [other.ident]


def test_other_threads_run_meanwhile():
    """The callable waits for another thread, which needs the interpreter's lock."""

    def wait(x):
        results = []
        other = threading.Thread(target=lambda: results.append(x + 1))
        other.start()
        other.join()
        return results[0]

    assert torch.equal(infer(wait)(X), 2 * X + 2)


def test_executors_in_several_threads():
    def work(x):
        time.sleep(0.001)
        return x.square()

    models = [infer(work, d=5) for _ in range(4)]
    inputs = [torch.randn(10) for _ in models]
    results = {}

    def call(i):
        for _ in range(3):
            results[i] = models[i](inputs[i])

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(inputs):
        torch.testing.assert_close(results[i], (2 * x).square() + 1)


# --- Who uses the executor ----------------------------------------------------


def test_calling_the_same_executor_is_an_error():
    holder = []

    def again(x):
        if holder and holder[0].isCompiled():
            holder[0](x)
        return x

    holder.append(infer(again))
    with pytest.raises(poptorch.Error, match="already running"):
        holder[0](X)
    model = holder.pop()
    assert torch.equal(model(X), 2 * X + 1)


def test_calling_the_same_executor_to_compile_it_is_an_error():
    holder = []

    def again(x):
        return holder[0](x) if holder else x

    holder.append(infer(again))
    with pytest.raises(poptorch.Error, match="No CPU operation may call another one"):
        holder[0](X)
    model = holder.pop()
    assert torch.equal(model(X), 2 * X + 1)


@pytest.mark.parametrize("compiled", [False, True])
def test_another_executor_may_be_called(compiled):
    inner = poptorch.inferenceModel(nn.Linear(2, 2), make_options())
    if compiled:
        inner(X)
    model = infer(lambda x: inner(x))
    torch.testing.assert_close(model(X), inner.model(2 * X).detach() + 1)
    torch.testing.assert_close(inner(X), inner.model(X).detach())


def test_destroying_an_executor_meanwhile():
    """The run continues; the next call compiles again."""
    holder = []

    def leave(x):
        if holder and holder[0].isCompiled():
            holder.pop().destroy()
        return x

    model = infer(leave, d=2)
    holder.append(model)
    x = torch.ones(4)
    assert torch.equal(model(x), 2 * x + 1)
    assert not holder
    assert not model.isCompiled()
    assert torch.equal(model(x), 2 * x + 1)


@pytest.mark.parametrize("method", ["destroy", "detachFromDevice", "copyWeightsToHost"])
def test_fetching_what_a_run_is_changing_is_an_error(method):
    holder = []

    def leave(x):
        if holder:
            getattr(holder[0], method)()
        return x

    net = Net(leave, (0, 0))
    model = poptorch.trainingModel(net, make_options(), poptorch.optim.SGD(net.parameters(), 0.1))
    model(torch.ones(3, 4))
    holder.append(model)
    with pytest.raises(poptorch.Error, match="is running"):
        model(torch.ones(3, 4))
    holder.clear()
    model(torch.ones(3, 4))


def test_reading_trained_weights_from_another_thread_is_an_error():
    net = None
    found = []

    def read():
        try:
            found.append(net.first.weight.sum())
        except poptorch.Error as error:
            found.append(str(error))

    def code(x):
        if net is not None:
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        return x

    model_net = Net(code, (0, 0))
    optimizer = poptorch.optim.SGD(model_net.parameters(), 0.1)
    model = poptorch.trainingModel(model_net, make_options(), optimizer)
    model(torch.ones(3, 4))
    net = model_net
    model(torch.ones(3, 4))
    assert len(found) == 2 and all("is running" in str(text) for text in found)


def test_stopping_from_another_thread():
    calls = []

    def code(x):
        calls.append(1)
        time.sleep(0.01)
        return x

    model = infer(code, d=1000)
    model.compile(torch.ones(2000))
    executable = model.compiled.executable

    def stop():
        while not executable.stop():
            time.sleep(0.001)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(poptorch.Error, match=r"stopped after \d+ of 1000"):
        model(torch.ones(2000))
    thread.join()
    assert len(calls) < 1000


@pytest.fixture
def ctrl_c():
    """Handle Ctrl-C as Python does in a terminal; background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_a_call(ctrl_c):
    """KeyboardInterrupt is raised on Python's main thread, in the callable."""
    on = [False]

    def code(x):
        if on[0]:
            ctrl_c()
            for _ in range(100):
                time.sleep(0.05)
        return x

    model = infer(code, d=2)
    x = torch.ones(4)
    model(x)
    on[0] = True
    with pytest.raises(KeyboardInterrupt):
        model(x)
    on[0] = False
    assert torch.equal(model(x), 2 * x + 1)


def test_others_go_on_while_a_callable_takes_long():
    ticks = []

    def code(x):
        while x.any() and len(ticks) < 5:
            time.sleep(0.01)
        return x

    model = infer(code)
    model.compile(X)
    done = threading.Event()

    def count():
        while not done.wait(0.01):
            ticks.append(model.isCompiled())

    thread = threading.Thread(target=count)
    thread.start()
    assert torch.equal(model(X), 2 * X + 1)
    done.set()
    thread.join()
    assert len(ticks) >= 5


# --- Copies and memory --------------------------------------------------------


def add_one(x):
    return x + 1


def test_copies_and_pickles():
    model = infer(add_one)
    expected = model(X)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(X), expected)


@pytest.mark.parametrize("training", [False, True])
def test_nothing_keeps_the_executor(training):
    """Even a callable that refers to the executor does not keep it alive."""
    holder = []

    class Code:
        def __call__(self, x):
            return x + len(holder)

    code = Code()
    if training:
        net = Net(code, (0, 0))
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        model = poptorch.trainingModel(net, make_options(), optimizer)
        del net, optimizer
    else:
        model = infer(code)
    code.model = model
    model(torch.ones(3, 4))
    found = weakref.ref(model), weakref.ref(code)
    del model, code
    gc.collect()
    assert [ref() for ref in found] == [None, None]


def test_tensors_are_freed_behind_each_call():
    alive = weakref.WeakSet()

    def code(x):
        alive.add(x)
        result = x + 1
        alive.add(result)
        return result

    model = infer(code, d=5)
    for _ in range(3):
        model(torch.ones(10))
        assert not alive


def test_profile():
    num_calls = []

    def code(x):
        num_calls.append(1)
        return x

    model = infer(code, d=2)
    profile = model.profile(torch.ones(4), repeats=3)
    assert len(num_calls) == 1 + 6
    (op,) = [op for op in profile if op.kind == "host_call"]
    assert (op.executions, op.name) == (2, "CPU:0")
    assert f"{host_calls.__file__}:" in op.source
