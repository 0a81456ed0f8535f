"""Optimizers without an update op: the device does what their own step does."""

import copy
import functools
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import popsim_torch as poptorch
from popsim_torch.reference import Interpreter
from tests.parity.user_optimizers import USER_OPTIMIZERS, Counted, Lion, Lookahead, NormedLamb

optim = torch.optim
TORCH_OPTIMIZERS = {
    "Adadelta": lambda p: optim.Adadelta(p, lr=1.0, weight_decay=0.01),
    "Adafactor": lambda p: optim.Adafactor(p, lr=0.05),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam maximize": lambda p: optim.Adam(p, lr=0.01, maximize=True, weight_decay=0.1),
    "AdamW amsgrad": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True, foreach=True),
    "Adamax": lambda p: optim.Adamax(p, lr=0.01),
    "ASGD": lambda p: optim.ASGD(p, lr=0.05, t0=3, lambd=0.1),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: optim.RAdam(p, lr=0.01),
    "RMSprop maximize": lambda p: optim.RMSprop(p, lr=0.01, maximize=True, centered=True),
    "Rprop": lambda p: optim.Rprop(p, lr=0.01),
    "SGD maximize": lambda p: optim.SGD(
        p, lr=0.1, momentum=0.9, dampening=0.1, nesterov=False, maximize=True
    ),
}
OPTIMIZERS = {**TORCH_OPTIMIZERS, **USER_OPTIMIZERS}
SOME = ("RAdam", "Adafactor", "Lookahead", "NormedLamb", "Rebinding")


class Net(nn.Module):
    """Two layers and a loss."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 4)

    def forward(self, x, y):
        out = self.b(torch.relu(self.a(x)))
        return functional.cross_entropy(out, y)


class Pair:
    """A model that a program trains, and the same one for eager PyTorch."""

    def __init__(self, make, options=None, batch=16, steps=12):
        torch.manual_seed(0)
        self.net = Net()
        self.eager = copy.deepcopy(self.net)
        self.x = torch.randn(steps, batch, 6)
        self.y = torch.randint(4, (steps, batch))
        self.optimizer = make(list(self.net.parameters()))
        self.reference = make(list(self.eager.parameters()))
        self.model = poptorch.trainingModel(self.net, options or quiet(), self.optimizer)

    def step(self, first, last, *, parts=1):
        """Train both for some batches; eager adds up the gradients of parts of each batch."""
        for x, y in zip(self.x[first:last], self.y[first:last], strict=True):
            self.model(x, y)
            self.reference.zero_grad()
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (self.eager(a, b) / parts).backward()
            self.reference.step()

    def check(self, tolerance=1e-5):
        self.model.copyWeightsToHost()
        for own, other in zip(self.net.parameters(), self.eager.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


def quiet():
    return poptorch.Options().showCompilationProgressBar(False)


def assert_states_equal(own, other):
    filled = {key: entries for key, entries in other["state"].items() if entries}
    assert own["state"].keys() == filled.keys()
    for key, entries in filled.items():
        assert own["state"][key].keys() == entries.keys()
        for name, value in entries.items():
            found = own["state"][key][name]
            assert type(found) is type(value), name
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps(name):
    pair = Pair(OPTIMIZERS[name])
    pair.step(0, 10)
    pair.check()


@pytest.mark.parametrize("another", [False, True], ids=["the same", "another"])
@pytest.mark.parametrize("decay", [0.0, 0.1])  # (with 0.1, the program is made again)
def test_states_that_an_optimizer_has_loaded(decay, another):
    def make(parameters):
        return optim.NAdam(parameters, lr=0.01)

    pair = Pair(make)
    pair.step(0, 3)
    states = copy.deepcopy(pair.optimizer.state_dict())
    for state in states["state"].values():
        state["exp_avg"] *= 50
    states["param_groups"][0]["weight_decay"] = decay
    if another:
        pair.optimizer = make(list(pair.net.parameters()))
    for one in (pair.optimizer, pair.reference):
        one.load_state_dict(copy.deepcopy(states))
    pair.model.setOptimizer(pair.optimizer)
    pair.step(3, 6)
    pair.check()


def test_muon_rounds_as_its_bfloat16_kernels_do():
    def matrices(parameters):
        return optim.Muon([p for p in parameters if p.dim() == 2], lr=0.02)

    pair = Pair(matrices)
    pair.step(0, 1)
    pair.check(2e-3)  # a bfloat16 has 8 bits, and the step is 0.02


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_dict_is_that_of_pytorch(name):
    pair = Pair(OPTIMIZERS[name])
    pair.step(0, 4)
    assert_states_equal(pair.optimizer.state_dict(), pair.reference.state_dict())


# (PyTorch keeps the number of an attribute out of its dictionary.)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"Counted"}))
def test_a_state_of_pytorch_continues_on_the_device_and_back(name):
    pair = Pair(OPTIMIZERS[name])
    for x, y in zip(pair.x[:3], pair.y[:3], strict=True):
        pair.reference.zero_grad()
        pair.eager(x, y).backward()
        pair.reference.step()
    pair.net.load_state_dict(pair.eager.state_dict())
    pair.optimizer.load_state_dict(copy.deepcopy(pair.reference.state_dict()))
    pair.model = None  # it was never compiled
    pair.model = poptorch.trainingModel(pair.net, quiet(), pair.optimizer)
    pair.step(3, 6)
    pair.check()
    eager = copy.deepcopy(pair.eager)
    reference = OPTIMIZERS[name](list(eager.parameters()))
    reference.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
    for x, y in zip(pair.x[6:9], pair.y[6:9], strict=True):
        reference.zero_grad()
        eager(x, y).backward()
        reference.step()
    pair.step(6, 9)
    for own, other in zip(eager.parameters(), pair.eager.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", *SOME])
def test_a_state_that_is_loaded_in_between_is_used(name):
    native = {
        "SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
        "Adam": lambda p: optim.Adam(p, lr=0.01),
        "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5),
    }
    pair = Pair({**OPTIMIZERS, **native}[name])
    pair.step(0, 2)
    saved = copy.deepcopy(pair.optimizer.state_dict())
    weights = copy.deepcopy(pair.net.state_dict())
    pair.step(2, 5)
    pair.optimizer.load_state_dict(saved)
    pair.net.load_state_dict(weights)
    pair.model.copyWeightsToDevice()
    pair.reference.load_state_dict(copy.deepcopy(saved))
    pair.eager.load_state_dict(weights)
    pair.step(5, 8)
    pair.check()


@pytest.mark.parametrize("name", SOME)
def test_gradient_accumulation(name):
    options = quiet()
    options.Training.gradientAccumulation(4)
    pair = Pair(OPTIMIZERS[name], options)
    pair.step(0, 5, parts=4)
    pair.check()


@pytest.mark.parametrize("name", SOME)
def test_replicas(name):
    pair = Pair(OPTIMIZERS[name], quiet().replicationFactor(2))
    pair.step(0, 5, parts=2)
    pair.check()


@pytest.mark.parametrize("name", SOME)
def test_pipeline(name):
    options = quiet()
    options.Training.gradientAccumulation(4)
    pair = Pair(OPTIMIZERS[name], options)
    poptorch.BeginBlock(pair.net.b, ipu_id=1)
    pair.step(0, 5, parts=4)
    pair.check()


@pytest.mark.parametrize("name", SOME)
def test_device_iterations_and_anchors_of_states(name):
    options = quiet().deviceIterations(4)
    options.outputMode(poptorch.OutputMode.All)
    pair = Pair(OPTIMIZERS[name], options, batch=32)
    pair.model.compile(pair.x[0], pair.y[0])
    states = [n for n in pair.model.getTensorNames() if n.endswith("___a.weight")]
    kept = next(
        n for n in states if n.split("___")[0] in ("exp_avg", "row_var", "slow", "m", "average")
    )
    options = quiet().deviceIterations(4)
    options.anchorTensor("state", f"UpdatedVar___{kept}", poptorch.OutputMode.All)
    pair = Pair(OPTIMIZERS[name], options, batch=32)
    pair.model(pair.x[0], pair.y[0])
    for x, y in zip(pair.x[0].chunk(4), pair.y[0].chunk(4), strict=True):
        pair.reference.zero_grad()
        pair.eager(x, y).backward()
        pair.reference.step()
    pair.check()
    last = pair.model.getAnchoredTensor("state").chunk(4)[-1]
    expected = pair.reference.state[pair.eager.a.weight][kept.split("___")[0]]
    torch.testing.assert_close(last, expected, rtol=1e-4, atol=1e-6)


def test_groups_have_values_of_their_own():
    def make(parameters):
        return optim.NAdam(
            [
                {"params": parameters[:2], "lr": 0.02},
                {"params": parameters[2:], "betas": (0.5, 0.9)},
            ],
            lr=0.01,
        )

    pair = Pair(make)
    pair.step(0, 6)
    pair.check()


def test_schedulers_move_values_without_a_new_program():
    pair = Pair(lambda p: optim.Adamax(p, lr=0.02))
    schedulers = [
        optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (pair.optimizer, pair.reference)
    ]
    pair.step(0, 1)
    executable = pair.model._device.compiled.executable
    for number in range(1, 6):
        for scheduler in schedulers:
            scheduler.step()
        pair.model.setOptimizer(pair.optimizer)
        pair.step(number, number + 1)
    assert pair.model._device.compiled.executable is executable
    pair.check()


def test_a_value_that_changes_the_operations_compiles_again():
    pair = Pair(lambda p: optim.Adamax(p, lr=0.02))
    pair.step(0, 3)
    for optimizer in (pair.optimizer, pair.reference):
        optimizer.param_groups[0]["weight_decay"] = 0.1  # 0 before: no term for it
    pair.model.setOptimizer(pair.optimizer)
    pair.step(3, 6)
    pair.check()


def test_another_object_continues_the_states():
    pair = Pair(OPTIMIZERS["NAdam"])
    pair.step(0, 3)
    pair.optimizer = OPTIMIZERS["NAdam"](list(pair.net.parameters()))
    pair.model.setOptimizer(pair.optimizer)
    pair.step(3, 6)
    pair.check()
    assert_states_equal(pair.optimizer.state_dict(), pair.reference.state_dict())


@pytest.mark.parametrize("name", SOME)
def test_loss_scaling_changes_nothing(name):
    class Scaled:
        def __call__(self, parameters):
            optimizer = OPTIMIZERS[name](parameters)
            optimizer.loss_scaling = 64.0
            return optimizer

    pair = Pair(Scaled())
    pair.step(0, 5)
    pair.check()


def test_half_weights_round_as_eager_does():
    def make(parameters):
        return Lion(parameters, lr=2**-6)

    torch.manual_seed(0)
    net = Net().half()
    eager = copy.deepcopy(net)
    model = poptorch.trainingModel(net, quiet(), make(net.parameters()))
    reference = make(eager.parameters())
    x, y = torch.randn(4, 16, 6).half(), torch.randint(4, (4, 16))
    for a, b in zip(x, y, strict=True):
        model(a, b)
        reference.zero_grad()
        eager(a, b).backward()
        reference.step()
    model.copyWeightsToHost()
    for own, other in zip(net.parameters(), eager.parameters(), strict=True):
        assert own.dtype == torch.float16
        torch.testing.assert_close(own, other, rtol=0.02, atol=2**-5)


def test_parameters_in_no_group_stay_and_a_warning_names_them(caplog):
    pair = Pair(lambda p: optim.Adagrad(p[:2], lr=0.1))
    pair.step(0, 3)
    pair.check()
    assert "does not update these parameters" in caplog.text
    assert "b.weight, b.bias" in caplog.text


@pytest.mark.parametrize("name", SOME)
def test_the_body_of_a_device_loop(name):
    pair = Pair(OPTIMIZERS[name])

    def step(x, y):
        pair.optimizer.zero_grad()
        loss = pair.net(x, y)
        loss.backward()
        pair.optimizer.step()

    infeed = poptorch.InfeedQueue(list(zip(pair.x[:4], pair.y[:4], strict=True)))

    @poptorch.function
    def train():
        poptorch.repeat(4, step, infeed=infeed)

    train()
    for x, y in zip(pair.x[:4], pair.y[:4], strict=True):
        pair.reference.zero_grad()
        pair.eager(x, y).backward()
        pair.reference.step()
    for own, other in zip(pair.net.parameters(), pair.eager.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), rtol=1e-5, atol=1e-5)
    assert_states_equal(pair.optimizer.state_dict(), pair.reference.state_dict())


@pytest.mark.parametrize("name", ["RAdam", "Adafactor"])
def test_a_model_from_a_file_trains_on(name, tmp_path):
    pair = Pair(OPTIMIZERS[name])
    pair.step(0, 2)
    path = tmp_path / "model.poptorch"
    pair.model.compileAndExport(str(path), pair.x[0], pair.y[0])
    loaded = poptorch.load(str(path))
    for x, y in zip(pair.x[2:5], pair.y[2:5], strict=True):
        loaded(x, y)
    pair.step(2, 5)
    loaded.copyWeightsToHost()
    weights = dict(loaded.named_parameters())
    for key, value in pair.eager.named_parameters():
        torch.testing.assert_close(weights[key], value, rtol=1e-5, atol=1e-5)


def test_a_class_of_the_user_is_not_put_into_a_file(tmp_path):
    pair = Pair(NormedLamb)
    pair.step(0, 1)
    with pytest.raises(poptorch.Error, match="its class is code"):
        pair.model.compileAndExport(str(tmp_path / "a"), pair.x[0], pair.y[0])
    path = str(tmp_path / "b")
    pair.model.compileAndExport(path, pair.x[0], pair.y[0], export_model=False)
    pair.model.destroy()
    pair.model = poptorch.trainingModel(pair.net, quiet(), pair.optimizer)
    pair.model.loadExecutable(path)
    pair.step(1, 4)
    pair.check()


def test_the_reference_interpreter_agrees():
    pair = Pair(OPTIMIZERS["RAdam"])
    pair.model.compile(pair.x[0], pair.y[0])
    interpreter = Interpreter.like(pair.model)
    for x, y in zip(pair.x[:6], pair.y[:6], strict=True):
        pair.model(x, y)
        interpreter.run([x, y])
    pair.model.copyWeightsToHost()
    torch.testing.assert_close(
        interpreter.read("a.weight"), pair.net.a.weight.detach(), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (functools.partial(optim.LBFGS, lr=0.1), "closure"),
        (optim.SparseAdam, "dense"),
    ],
)
def test_optimizers_that_a_program_cannot_step(kind, text):
    net = Net()
    with pytest.raises(poptorch.Error, match=text):
        poptorch.trainingModel(net, quiet(), kind(net.parameters()))


class _OfItsOwn(optim.Optimizer):
    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {"lr": 0.1})
        self.own = parameters

    def step(self):
        for p in self.own:
            p.data.sub_(p.grad)


class _Printing(optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=float(p.grad.norm()))


class _Growing(optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            history = self.state[p].setdefault("history", [])
            history.append(p.grad.clone())
            p.sub_(sum(history))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (_OfItsOwn, "keeps parameters in its attribute 'own'"),
        (_Printing, r"needs the value of a number in float\(\)"),
        (_Growing, "adds or removes states"),
    ],
)
def test_steps_that_cannot_be_traced_say_why(kind, text):
    net = Net()
    model = poptorch.trainingModel(net, quiet(), kind(net.parameters()))
    x, y = torch.randn(4, 6), torch.randint(4, (4,))
    with pytest.raises(poptorch.Error, match=text):
        model(x, y)
    model.setOptimizer(optim.Adagrad(net.parameters()))
    before = net.a.weight.detach().clone()
    model(x, y)
    assert not torch.equal(before, net.a.weight)


def of_step(function, **values):
    """Return an optimizer class whose step calls ``function(optimizer, group, p, state)``."""

    class OfStep(optim.Optimizer):
        def __init__(self, parameters, **given):
            super().__init__(parameters, {"lr": 0.1, **given})
            vars(self).update({name: copy.deepcopy(value) for name, value in values.items()})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for p in group["params"]:
                    function(self, group, p, self.state[p])

    return OfStep


def masked(self, group, p, state):
    mask = (3 * p.grad).bool()
    p.sub_(mask * 0.1)


def list_that_is_changed_later(self, group, p, state):
    if not state:
        kept = [torch.zeros_like(p)]
        state["kept"] = kept
        kept[0] = torch.ones_like(p)
    state["kept"][0].add_(p.grad)
    p.sub_(state["kept"][0] * 0.01)


def rounded(self, group, p, state):
    state["n"] = state.get("n", 0) + 1
    p.sub_(p.grad * round(0.123 * state["n"], 1) + 0.01 * (state["n"] // 2))


def with_erf(self, group, p, state):
    if not state:
        state["t"] = torch.zeros(())
    state["t"] += 0.1
    p.sub_(p.grad * torch.erf(state["t"]))


def with_tensors_of_the_object(self, group, p, state):
    p.sub_(p.grad * self.scale * self.table[1])


def changing_a_tensor_of_the_object(self, group, p, state):
    state["seen"] = state.get("seen", 0) + 1
    self.scale.mul_(0.9)
    p.sub_(p.grad * self.scale)


def filled(self, group, p, state):
    p.sub_(torch.full_like(p, 0.01) + torch.full((), 0.02) * p.grad)


def comparisons_in_tensors(self, group, p, state):
    state["n"] = state.get("n", 0) + 1
    even = torch.as_tensor(state["n"] % 2 == 0)
    late = torch.tensor([state["n"] > 3])
    p.sub_(torch.where(even & ~late, 0.5 * p.grad, p.grad) * group["lr"])


def tuples_and_dicts(self, group, p, state):
    if not state:
        state["pair"] = (torch.zeros_like(p), {0: torch.ones_like(p), "n": 1})
    mean, others = state["pair"]
    others[0].mul_(0.5)
    others["n"] += 1
    state["pair"] = (mean + p.grad, others)
    p.sub_((mean + others[0]) / others["n"] * 0.1)


def named_like_the_flag(self, group, p, state):
    if "stepped" not in state:
        state["stepped"] = p.grad.clone()
    state["stepped"].mul_(0.5)
    p.sub_(state["stepped"])


def dividing_by_zero_at_first(self, group, p, state):
    if not state:
        state["mean"], state["norms"], state["n"] = torch.zeros_like(p), 0.0, 0
    try:
        factor = 1.0 / state["norms"]
    except ZeroDivisionError:
        factor = 0.5
    try:
        rest = 7 % state["n"]
    except ArithmeticError:
        rest = 2
    try:
        none = 1.0 / self.zero
    except Exception:
        none = 0.25
    state["mean"].mul_(0.9).add_(p.grad)
    p.sub_(state["mean"], alpha=group["lr"] * min(factor, 2.0) * (1 + rest) * none)
    state["norms"] = state["norms"] + p.grad.norm().item()
    state["n"] += 1


@pytest.mark.parametrize(
    ("step", "values"),
    [
        (dividing_by_zero_at_first, {"zero": 0.0}),
        (masked, {}),
        (list_that_is_changed_later, {}),
        (rounded, {}),
        (with_erf, {}),
        (with_tensors_of_the_object, {"scale": torch.tensor(2.0), "table": torch.ones(2) / 4}),
        (filled, {}),
        (comparisons_in_tensors, {}),
        (tuples_and_dicts, {}),
        (named_like_the_flag, {}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_step_may_do(step, values):
    pair = Pair(of_step(step, **values))
    pair.step(0, 6)
    pair.check()
    filled_entries = [one for one in pair.reference.state.values() if one]
    if filled_entries:
        assert_states_equal(pair.optimizer.state_dict(), pair.reference.state_dict())


def test_a_tensor_of_the_object_is_a_state():
    make = of_step(changing_a_tensor_of_the_object, scale=torch.tensor(0.5))
    pair = Pair(lambda parameters: make(parameters[:1]))
    pair.step(0, 5)
    pair.check()
    pair.optimizer.state_dict()
    torch.testing.assert_close(pair.optimizer.scale, pair.reference.scale)


class ComplexNet(nn.Module):
    """One complex and one real weight, and a loss."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.b = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return ((x.to(torch.complex64) @ self.w).abs() + self.b).square().mean()


class WithLoss(nn.Module):
    """Marks the loss of a model."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return poptorch.identity_loss(self.net(x), "none")


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "make", [optim.Adadelta, optim.Adagrad, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam]
)
def test_complex_weights(make, accumulation):
    torch.manual_seed(0)
    net = ComplexNet()
    eager = copy.deepcopy(net)
    options = quiet()
    options.Training.gradientAccumulation(accumulation)
    optimizer, reference = make(net.parameters()), make(eager.parameters())
    model = poptorch.trainingModel(WithLoss(net), options, optimizer)
    for _ in range(4):
        x = torch.randn(4 * accumulation, 4)
        model(x)
        reference.zero_grad()
        for part in x.chunk(accumulation):
            (eager(part) / accumulation).backward()
        reference.step()
    model.copyWeightsToHost()
    for own, other in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(own.detach(), other.detach(), rtol=1e-5, atol=1e-5)
    assert_states_equal(optimizer.state_dict(), reference.state_dict())


class ClippedSGD(poptorch.optim.SGD):
    """An optimizer of PopTorch's API with a step of the user."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).add_(p.grad.clamp(-0.1, 0.1))
                p.sub_(group["lr"] * velocity)


def test_a_subclass_of_poptorchs_with_a_step_of_its_own():
    pair = Pair(lambda p: ClippedSGD(p, lr=0.1, momentum=0.9, loss_scaling=8.0))
    pair.step(0, 3)
    pair.check()
    saved = pair.optimizer.state_dict()
    assert "velocity___a.weight" in saved["ipu_state"]
    for optimizer in (pair.optimizer, pair.reference):
        optimizer.param_groups[0]["lr"] = 0.01
    pair.model.setOptimizer(pair.optimizer)
    pair.step(3, 5)
    pair.check()
    pair.optimizer.load_state_dict(saved)  # (the reference has no such dictionary)
    pair.model(pair.x[0], pair.y[0])
    now = pair.optimizer.state_dict()["ipu_state"]["velocity___a.weight"]
    limit = 0.9 * saved["ipu_state"]["velocity___a.weight"].abs() + 0.1 + 1e-6
    assert (now.abs() <= limit).all()


def test_initial_states_are_those_of_the_optimizer_at_hand():
    # The same operations, so they are traced once; but a state begins with the rate.
    for rate in (0.01, 0.1):
        pair = Pair(lambda p, rate=rate: optim.Rprop(p, lr=rate))
        pair.step(0, 4)
        pair.check()


def test_numbers_that_moved_continue_in_a_new_model():
    pair = Pair(Lookahead)
    pair.step(0, 4)
    pair.optimizer.state_dict()
    assert pair.optimizer.param_groups[0]["steps"] == 4
    pair.model.destroy()
    pair.model = poptorch.trainingModel(pair.net, quiet(), pair.optimizer)
    pair.step(4, 9)
    pair.check()


def test_a_number_that_the_device_moves_is_no_change_of_the_user(caplog):
    pair = Pair(Lookahead)
    pair.step(0, 3)
    pair.optimizer.state_dict()
    pair.step(3, 5)
    pair.check()
    assert "the model still uses" not in caplog.text


def many_conditions(self, group, p, state):
    for number in range(12):
        if p.grad.mean() * number > 0.1:
            p.sub_(p.grad)


def tensors_in_a_list(self, group, p, state):
    p.sub_(p.grad * self.table[0])


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("step", "values", "text"),
    [
        (
            many_conditions,
            {},
            r"more than 64 different paths.*'if' at \S*test_traced_optimizers.py:\d+\.",
        ),
        (tensors_in_a_list, {"table": [torch.ones(())]}, "keeps a tensor inside of its attribute"),
    ],
)
def test_steps_with_more_than_a_device_has(step, values, text):
    net = Net()
    model = poptorch.trainingModel(net, quiet(), of_step(step, **values)(net.parameters()))
    with pytest.raises(poptorch.Error, match=text):
        model(torch.randn(4, 6), torch.randint(4, (4,)))


def noise(self, group, p, state):
    p.copy_(torch.randn_like(p))


def test_drawn_numbers_differ_between_steps_and_weights():
    weights = []
    for _ in range(2):
        net = Net()
        options = quiet().randomSeed(3)
        model = poptorch.trainingModel(net, options, of_step(noise)(net.parameters()))
        for _ in range(2):
            model(torch.randn(4, 6), torch.randint(4, (4,)))
            weights.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    first, second, again, _ = weights
    assert torch.equal(first, again)
    assert not torch.isin(first, second).any()
    assert first.unique().numel() == first.numel()


def test_programs_are_found_in_the_executable_cache(tmp_path):
    found = []
    for _ in range(2):
        options = quiet()
        options.enableExecutableCaching(str(tmp_path))
        net = Net()
        model = poptorch.trainingModel(net, options, optim.Adamax(net.parameters()))
        model(torch.randn(4, 6), torch.randint(4, (4,)))
        found.append("read the executable cache" in str(model.compile_log()))
    assert found == [False, True]


@pytest.mark.parametrize("make", [optim.Adam, optim.Adamax, NormedLamb])
def test_nothing_outlives_a_model_and_its_optimizer(make):
    net = Net()
    optimizer = make(net.parameters())
    model = poptorch.trainingModel(net, quiet(), optimizer)
    model(torch.randn(4, 6), torch.randint(4, (4,)))
    gone = [weakref.ref(one) for one in (net, optimizer, model)]
    del net, optimizer, model
    gc.collect()
    assert [one() for one in gone] == [None] * 3


def test_tracing_leaves_the_optimizer_and_python_as_they_were():
    import math

    pair = Pair(USER_OPTIMIZERS["OldAdam"])
    root, smaller = math.sqrt, min
    groups = copy.deepcopy(pair.optimizer.param_groups[0]["betas"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.model.compile(pair.x[0], pair.y[0])
    assert math.sqrt is root
    assert min is smaller
    assert pair.optimizer.param_groups[0]["betas"] == groups
    assert not pair.optimizer.state
    assert Counted(pair.net.parameters()).count == 0
    assert {Lookahead, NormedLamb} <= {
        type(make([pair.net.a.weight])) for make in USER_OPTIMIZERS.values()
    }
