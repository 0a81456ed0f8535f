"""Code of the host that a program calls: exceptions, threads, signals, use of the executor."""

import copy
import gc
import pickle
import signal
import sys
import threading
import time
import traceback
import weakref

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from tests.options import make_options

pytestmark = pytest.mark.timeout(120)
X = torch.tensor([1.0, -2.0])


class Calling(nn.Module):
    """Doubles its input, calls the host, and adds one."""

    def __init__(self, function):
        super().__init__()
        self.cpu = poptorch.CPU(function, "code")

    def forward(self, x):
        return self.cpu(2 * x) + 1


def infer(function, d=1):
    options = make_options(d).outputMode(OutputMode.All)
    return poptorch.inferenceModel(Calling(function), options)


class Failing:
    """Hands its argument on, but for the calls that raise an exception."""

    def __init__(self, error, *when):
        self.num_calls = 0
        self._error, self._when = error, when

    def __call__(self, x):
        self.num_calls += 1
        if self.num_calls in self._when:
            raise self._error
        return x


class Own(Exception):
    def __init__(self, code, detail):
        super().__init__(code, detail)
        self.code = code


ERRORS = [
    *(ValueError("ours"), KeyError("ours"), Own(7, "ours"), StopIteration("ours")),
    *(poptorch.Error("ours"), RuntimeError("ours"), SystemExit(3), KeyboardInterrupt()),
    GeneratorExit(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_exception_is_raised_as_it_is(error):
    error = copy.copy(error)
    code = Failing(error, 4)  # after the call with zeros
    model = infer(code, d=3)
    for _ in range(2):
        if code.num_calls == 0:
            with pytest.raises(type(error)) as caught:
                model(torch.ones(6))
            assert caught.value is error
            assert code.num_calls == 4
            frame = traceback.extract_tb(error.__traceback__)[-1]
            assert (frame.name, frame.line) == ("__call__", "raise self._error")
            if sys.version_info >= (3, 11):
                (note,) = error.__notes__
                assert "poptorch.CPU 'code', called at" in note
                assert f"{__file__}:" in note
        assert torch.equal(model(torch.ones(6)), torch.full((6,), 3.0))
    assert code.num_calls == 10


def test_an_exception_of_the_call_with_zeros():
    error = Own(7, "ours")
    code = Failing(error, 1)
    model = infer(code)
    with pytest.raises(Own) as caught:
        model(X)
    assert caught.value is error
    assert not model.isCompiled()
    assert not poptorch.isRunningOnIpu()
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch.equal(model(X), 2 * X + 1)


def test_changing_results_are_refused():
    results = iter([X, X, X.double(), (X, X), torch.ones(3), None, [[X]], X.int(), [X]])
    model = infer(lambda x: next(results))
    assert torch.equal(model(X), X + 1)
    for came in (
        r"float64 \[2\] as result 0 where it returned float32 \[2\]",
        "2 tensors where it returned 1",
        r"float32 \[3\] as result 0 where it returned float32 \[2\]",
        "returns 'NoneType'",
        "returns 'list' in a list",
        r"int32 \[2\] as result 0",
    ):
        with pytest.raises(poptorch.Error, match=rf"^[^\n]*poptorch.CPU 'code', called.*{came}"):
            model(X)
    assert torch.equal(model(X), X + 1)


# --- Training -----------------------------------------------------------------


class Net(nn.Module):
    """With everything that micro-batches change: running statistics, velocities, random numbers."""

    def __init__(self, code, stages):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.norm, self.drop = nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.cpu = poptorch.CPU(code, "code")
        self._stages = stages

    def forward(self, x):
        with poptorch.Block("a", ipu_id=self._stages[0]):
            x = self.drop(self.norm(torch.tanh(self.first(x))))
        with poptorch.Block("b", ipu_id=self._stages[1]):
            x = self.cpu(x)
            return poptorch.identity_loss(self.last(x).square(), "mean")


@pytest.mark.parametrize("stages", [(0, 0), (0, 1)])
@pytest.mark.parametrize("combined", [False, True])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_failing_device_iteration_is_given_up(stages, combined, in_backward):
    """The run ends as if it had been asked for fewer device iterations."""
    error = Own(7, "ours")
    switch = {"on": False}
    num_calls = []

    def code(x):
        if x.requires_grad == in_backward:
            num_calls.append(1)
        if switch["on"] and x.requires_grad == in_backward and len(num_calls) == 6:
            raise error
        return x.sin()

    def trained(d):
        net = Net(code, stages)
        options = make_options(d, 4, seed=5).outputMode(OutputMode.All)
        optimizer = poptorch.optim.SGD(
            net.parameters(), lr=0.1, momentum=0.9, use_combined_accum=combined
        )
        model = poptorch.trainingModel(net, options, optimizer)
        return net, model

    torch.manual_seed(1)
    x = torch.randn(2 * 4 * 3, 4)
    more = torch.randn(2 * 4 * 3, 4)

    net, model = trained(2)
    model.compile(x)
    num_calls.clear()
    switch["on"] = True
    with pytest.raises(Own):
        model(x)
    switch["on"] = False
    assert len(num_calls) == 6  # the second micro-batch of the second device iteration

    other, reference = trained(1)
    reference(x[:12])
    for name, value in other.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name
    # Optimizer state and random numbers go on from there.
    losses = model(more)
    expected = torch.cat([reference(more[:12]), reference(more[12:])])
    assert torch.equal(losses, expected)
    for name, value in other.state_dict().items():
        assert torch.equal(net.state_dict()[name], value), name


def test_an_exception_in_the_backward_pass_says_so():
    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            raise Own(7, "ours")

    net = Net(Refused.apply, (0, 0))
    model = poptorch.trainingModel(net, make_options(), poptorch.optim.SGD(net.parameters(), 0.1))
    with pytest.raises(Own) as caught:
        model(torch.ones(3, 4))
    if sys.version_info >= (3, 11):
        assert "while its gradient was computed" in caught.value.__notes__[0]


# --- Modules ------------------------------------------------------------------


class WithPart(nn.Module):
    """A part of the model runs on the host; it is registered, and has state of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.part = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.cpu = poptorch.CPU(self.part, "part")

    def forward(self, x):
        x = self.cpu(self.first(x))
        return x, poptorch.identity_loss(x.square(), "mean")


@pytest.mark.parametrize("training", [False, True])
def test_a_part_of_the_model(training):
    net = WithPart()
    twin = copy.deepcopy(net)
    assert not any(parameter.requires_grad for parameter in net.part.parameters())
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    if training:
        optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
        model = poptorch.trainingModel(net, make_options(), optimizer)
    else:
        model = poptorch.inferenceModel(net, make_options())
    twin.part(torch.zeros(4, 3))  # as the compilation does
    other = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 3)
        out, loss = model(x)
        expected, expected_loss = twin(x)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-4, atol=1e-5)
        if training:
            other.zero_grad()
            # The device calls the part once more, to differentiate it.
            copy_of_part = copy.deepcopy(twin.part)
            expected_loss.backward()
            other.step()
            copy_of_part(twin.first(x))
            twin.part[1].running_mean = net.part[1].running_mean.detach().clone()
            twin.part[1].running_var = net.part[1].running_var.detach().clone()
    for name, value in net.state_dict().items():
        if name.startswith("part.0"):
            assert torch.equal(value, weights[name])
    assert "part.0.weight" not in model.getTensorNames()
    assert net.part[1].num_batches_tracked == (7 if training else 4)
    torch.testing.assert_close(net.first.weight, twin.first.weight, rtol=1e-4, atol=1e-5)
    assert type(net.part[0].weight.detach()) is torch.Tensor


def test_modules_that_share_their_places():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Linear(2, 2)
            self.other = copy.copy(self.one)
            self.cpu = poptorch.CPU(self.other, "other")

        def forward(self, x):
            return self.cpu(self.one(x))

    net = Model()
    assert net.one._parameters is net.other._parameters
    model = poptorch.inferenceModel(net, make_options())
    for _ in range(2):
        torch.testing.assert_close(model(X), net.one(net.one(X)).detach())
    assert type(net.one.weight) is nn.Parameter


def test_changed_weights_of_a_module_count_at_the_next_call():
    part = nn.Linear(2, 2, bias=False)
    model = infer(part)
    nn.init.eye_(part.weight)
    assert torch.equal(model(X), 2 * X + 1)
    with torch.no_grad():
        part.weight *= 3
    assert torch.equal(model(X), 6 * X + 1)


def test_a_module_may_replace_its_buffers_on_the_host():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(1))

        def forward(self, x):
            self.count = self.count + 1
            return x + self.count

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.counter = Counter()
            self.cpu = poptorch.CPU(self.counter, "counter")

        def forward(self, x):
            return self.cpu(x)

    net = Model()
    model = poptorch.inferenceModel(net, make_options())
    assert torch.equal(model(X), X + 2)
    assert torch.equal(model(X), X + 3)
    assert net.counter.count == 3


def test_weights_that_the_device_trains_are_those_copied_last():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.cpu = poptorch.CPU(lambda x: x * self.weight, "tied")

        def forward(self, x):
            return self.cpu(x), poptorch.identity_loss(x * self.weight, "sum")

    net = Tied()
    model = poptorch.trainingModel(net, make_options(), poptorch.optim.SGD(net.parameters(), 1.0))
    ones = torch.ones(2)
    assert torch.equal(model(ones)[0], torch.ones(2))
    assert torch.equal(model(ones)[0], torch.ones(2))
    assert torch.equal(net.weight, torch.full((2,), -1.0))  # copies them
    assert torch.equal(model(ones)[0], torch.full((2,), -1.0))


def test_made_in_forward():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = nn.Linear(2, 2)

        def forward(self, x):
            return poptorch.CPU(self.part, "made in forward")(x)

    net = Model()
    model = poptorch.inferenceModel(net, make_options())
    torch.testing.assert_close(model(X), net.part(X))
    assert not net.part.weight.requires_grad
    assert type(net.part.weight) is nn.Parameter


def test_marked_as_the_begin_of_a_block():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.negate = poptorch.BeginBlock(poptorch.CPU(torch.neg, "neg"), ipu_id=1)

        def forward(self, x):
            return self.negate(2 * x)

    model = poptorch.inferenceModel(Model(), make_options(2).outputMode(OutputMode.All))
    assert torch.equal(model(torch.ones(4)), torch.full((4,), -2.0))
    (op,) = [op for op in model.compiled.program.graph.ops if op.kind == "host_call"]
    assert op.stage == 1


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
    """The run goes on; the next call compiles anew."""
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
    """Handle Ctrl-C as Python does in a terminal; processes in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_during_a_call(ctrl_c):
    """It is raised where Python runs, on the main thread: in the callable."""
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
    """Not even a callable that refers to it."""
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
    assert f"{__file__}:" in op.source
