"""Captured activations and gradients are those of eager PyTorch, and capturing changes nothing."""

import copy
import logging
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch
from popsim_torch.enums import OutfeedOptimizerMode, ReductionType
from popsim_torch.errors import Error
from popsim_torch.observe import MaybeOutfeed, MaybeOutfeedQueue, Outfeed, OutfeedOptimizer

BEFORE, AFTER = OutfeedOptimizerMode.BEFORE_APPLY, OutfeedOptimizerMode.AFTER_COMPUTE
ITERATIONS, BATCH = 3, 2


class Net(nn.Module):
    """Two layers, each followed by a tap; a ReLU in place after the first one."""

    def __init__(self, queue):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(4, 3)
        self.b = nn.Linear(3, 2)
        self.first = MaybeOutfeed(queue, False, "hidden")
        self.last = MaybeOutfeed(queue, True, "out")

    def forward(self, x, y):
        with poptorch.Block("0", ipu_id=0):
            hidden = torch.relu_(self.first(self.a(x)))
        with poptorch.Block("1", ipu_id=1):
            out = self.last(self.b(hidden))
            return out, F.mse_loss(out, y)


@dataclass
class Run:
    """A training run and what it captured."""

    model: nn.Module
    activations: dict = field(default_factory=dict)
    before: dict = field(default_factory=dict)
    after: dict = field(default_factory=dict)
    note: str = ""
    anchor: torch.Tensor | None = None


OPTIMIZERS = {
    "sgd": lambda p, **k: poptorch.optim.SGD(p, lr=0.1, **k),
    "momentum": lambda p, **k: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, **k),
    "combined": lambda p, **k: poptorch.optim.SGD(
        p, lr=0.1, momentum=0.9, use_combined_accum=True, **k
    ),
    "adamw": lambda p, **k: poptorch.optim.AdamW(p, lr=0.1, **k),
    "half accumulators": lambda p, **k: poptorch.optim.AdamW(
        p, lr=0.1, accum_type=torch.float16, **k
    ),
}


def make_options(stages, accumulation, reduction):
    options = poptorch.Options()
    options.deviceIterations(ITERATIONS)
    options.Training.gradientAccumulation(accumulation)
    options.Training.accumulationAndReplicationReductionType(reduction)
    options.anchorTensor("anchor", "Gradient___a.weight", poptorch.OutputMode.All)
    if stages == 2:
        stages = [poptorch.Stage("0"), poptorch.Stage("1")]
        options.setExecutionStrategy(poptorch.PipelinedExecution(*stages))
    else:
        options.setExecutionStrategy(poptorch.ShardedExecution())
    return options


def data(accumulation, dtype):
    torch.manual_seed(1)
    count = ITERATIONS * accumulation * BATCH
    return torch.randn(count, 4, dtype=dtype), torch.randn(count, 2, dtype=dtype)


def train(
    optimizer,
    *,
    stages=1,
    accumulation=4,
    reduction=ReductionType.Mean,
    dtype=torch.float32,
    capture=True,
    filters=None,
    **settings,
):
    queues = [MaybeOutfeedQueue(filters=filters) for _ in range(3)]
    net = Net(queues[0]).to(dtype)
    run = Run(copy.deepcopy(net))
    inner = OPTIMIZERS[optimizer](net.parameters(), **settings)
    if capture:
        inner = OutfeedOptimizer(OutfeedOptimizer(inner, queues[1], AFTER), queues[2])
    training = poptorch.trainingModel(net, make_options(stages, accumulation, reduction), inner)
    training(*data(accumulation, dtype))
    run.anchor = training.getAnchoredTensor("anchor")
    run.model = copy.deepcopy(net.state_dict())
    if capture:
        run.activations, run.after, run.before = (q.maybe_dequeue() for q in queues)
        run.note = queues[2].note
    training.destroy()
    return run


def eager(accumulation, dtype, reduction):
    """Return activations, and gradients of micro-batches and updates, of plain SGD."""
    net = Net(MaybeOutfeedQueue()).to(dtype).float()
    activations = {"hidden": [], "out": []}
    after = {f"{name}_grad": [] for name, _ in net.named_parameters()}
    before = copy.deepcopy(after)
    inputs, targets = (one.float() for one in data(accumulation, dtype))
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    pairs = zip(inputs.split(BATCH), targets.split(BATCH), strict=True)
    for index, (x, y) in enumerate(pairs):
        previous = [0 if p.grad is None else p.grad.clone() for p in net.parameters()]
        hidden = net.a(x)
        out = net.b(F.relu(hidden))
        F.mse_loss(out, y).backward()
        activations["hidden"].append(hidden.detach())
        activations["out"].append(out.detach())
        for (name, p), old in zip(net.named_parameters(), previous, strict=True):
            after[f"{name}_grad"].append(p.grad - old)
        if (index + 1) % accumulation == 0:
            for name, p in net.named_parameters():
                if reduction == ReductionType.Mean:
                    p.grad /= accumulation
                before[f"{name}_grad"].append(p.grad.clone())
            sgd.step()
            sgd.zero_grad()
    return [{k: torch.stack(v) for k, v in one.items()} for one in (activations, after, before)]


def assert_close(found, expected, dtype=torch.float32, scale=1.0):
    tolerance = {"rtol": 1e-4, "atol": 1e-6 * scale}
    if dtype == torch.float16:
        tolerance = {"rtol": 1e-2, "atol": 5e-3 * scale}
    assert sorted(found) == sorted(expected)
    for key, value in expected.items():
        torch.testing.assert_close(found[key].float(), value * scale, msg=key, **tolerance)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("reduction", [ReductionType.Mean, ReductionType.Sum])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_activations_and_gradients_are_those_of_eager_pytorch(stages, reduction, dtype):
    run = train("sgd", stages=stages, reduction=reduction, dtype=dtype)
    activations, after, before = eager(4, dtype, reduction)
    assert_close(run.activations, activations, dtype)
    assert_close(run.after, after, dtype)
    assert_close(run.before, before, dtype)
    word = "mean" if reduction == ReductionType.Mean else "sum"
    assert run.note == f"Accumulated over 4 micro-batches: {word}."
    # The anchor of the same gradient has the same bits.
    assert torch.equal(run.anchor, run.after["a.weight_grad"].flatten(0, 1).view_as(run.anchor))


@pytest.mark.parametrize("optimizer", [*OPTIMIZERS])
@pytest.mark.parametrize("stages", [1, 2])
def test_all_ways_to_accumulate_give_the_mean_over_micro_batches(optimizer, stages):
    run = train(optimizer, stages=stages)
    dtype = torch.float16 if optimizer == "half accumulators" else torch.float32
    for key, value in run.after.items():
        mean = value.view(ITERATIONS, 4, *value.shape[1:]).mean(1)
        found = run.before[key]
        assert found.dtype == dtype
        rtol, atol = (1e-5, 1e-7) if dtype == torch.float32 else (4e-3, 1e-4)
        torch.testing.assert_close(found.float(), mean, rtol=rtol, atol=atol)


@pytest.mark.parametrize("optimizer", ["sgd", "combined", "adamw"])
@pytest.mark.parametrize(("stages", "accumulation"), [(1, 1), (1, 4), (2, 4)])
def test_capturing_changes_no_bit(optimizer, stages, accumulation):
    plain = train(optimizer, stages=stages, accumulation=accumulation, capture=False)
    run = train(optimizer, stages=stages, accumulation=accumulation)
    assert torch.equal(plain.anchor, run.anchor)
    for name, value in plain.model.items():
        assert torch.equal(value, run.model[name]), name


@pytest.mark.parametrize("optimizer", ["sgd", "combined", "adamw"])
def test_without_accumulation_both_modes_give_the_same(optimizer):
    run = train(optimizer, accumulation=1)
    assert run.note == ""
    for key, value in run.after.items():
        assert torch.equal(value, run.before[key])
    if optimizer == "sgd":
        assert_close(run.after, eager(1, torch.float32, ReductionType.Mean)[1])


def test_gradients_carry_the_loss_scaling():
    run = train("sgd", loss_scaling=64.0)
    _, after, before = eager(4, torch.float32, ReductionType.Mean)
    assert_close(run.after, after, scale=64.0)
    assert_close(run.before, before, scale=64.0)
    assert run.note.endswith("Multiplied by the loss scaling, 64 when the program was compiled.")


def test_the_last_parameter_comes_first_and_axes_count_micro_batches_and_updates():
    run = train("adamw", stages=2)
    assert [*run.before] == ["b.bias_grad", "b.weight_grad", "a.bias_grad", "a.weight_grad"]
    assert [*run.activations] == ["hidden", "out"]
    assert run.before["a.weight_grad"].shape == (ITERATIONS, 3, 4)
    assert run.after["a.weight_grad"].shape == (ITERATIONS * 4, 3, 4)
    assert run.activations["hidden"].shape == (ITERATIONS * 4, BATCH, 3)


def test_filters_choose_gradients_and_activations():
    run = train("combined", filters=["a.", "hid"])
    assert [*run.activations] == ["hidden"]
    assert [*run.before] == [*run.after] == ["a.bias_grad", "a.weight_grad"]
    whole = train("combined")
    for key, value in run.before.items():
        assert torch.equal(value, whole.before[key])


def test_an_empty_list_of_filters_captures_nothing():
    run = train("sgd", filters=[])
    assert (run.activations, run.after, run.before) == (None, None, None)


@pytest.mark.parametrize("in_training", [True, False])
def test_a_layer_anywhere_in_a_sequence_captures_what_passes(in_training):
    queue = poptorch.OutfeedQueue()
    body = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Outfeed(queue, "x"), nn.ReLU(True)))
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = body[0](x).view(3, 2, 3)
    options = poptorch.Options().deviceIterations(3)
    if in_training:
        whole = WithLoss(body)
        sgd = torch.optim.SGD(body.parameters(), lr=0.0)
        executor = poptorch.trainingModel(whole, options, sgd)
    else:
        executor = poptorch.inferenceModel(body, options)
    executor(x)
    torch.testing.assert_close(queue.dequeue(), {"x": expected})


class WithLoss(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x).sum(), poptorch.identity_loss(self.body[0](x), "sum")


class TwoQueues(nn.Module):
    """Stage 1 with two dense layers, stage 2 with one: 28-256-128-10."""

    def __init__(self, first, second):
        super().__init__()
        self.dense1, self.dense2 = nn.Linear(28, 256), nn.Linear(256, 128)
        self.dense3 = nn.Linear(128, 10)
        self.tap1 = MaybeOutfeed(first, False, "dense1")
        self.tap2 = MaybeOutfeed(first, True, "dense2")
        self.tap3 = MaybeOutfeed(second, True, "dense3")

    def forward(self, x, y):
        with poptorch.Block("0", ipu_id=0):
            x = self.tap1(F.relu(self.dense1(x)))
            x = self.tap2(F.relu(self.dense2(x)))
        with poptorch.Block("1", ipu_id=1):
            logits = self.tap3(self.dense3(x))
            return F.cross_entropy(logits, y)


@pytest.mark.parametrize(("mode", "steps"), [(BEFORE, 10), (AFTER, 160)])
def test_the_worked_shapes_of_a_pipeline_with_a_queue_for_each_stage(mode, steps):
    first, second = MaybeOutfeedQueue(filters=["dense1"]), MaybeOutfeedQueue()
    gradients = MaybeOutfeedQueue(filters=["dense1", "dense2"])
    model = TwoQueues(first, second)
    options = poptorch.Options().deviceIterations(10)
    options.Training.gradientAccumulation(16)
    options.setExecutionStrategy(
        poptorch.PipelinedExecution(poptorch.Stage("0"), poptorch.Stage("1"))
    )
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, OutfeedOptimizer(sgd, gradients, mode))
    count = 10 * 16 * 32
    training(torch.rand(count, 28), torch.randint(10, (count,)))

    def shapes(queue):
        return {key: tuple(value.shape) for key, value in queue.dequeue().items()}

    assert shapes(first) == {"dense1": (160, 32, 256)}
    assert shapes(second) == {"dense3": (160, 32, 10)}
    assert shapes(gradients) == {
        "dense2.bias_grad": (steps, 128),
        "dense2.weight_grad": (steps, 128, 256),
        "dense1.bias_grad": (steps, 256),
        "dense1.weight_grad": (steps, 256, 28),
    }


def wrapped(mode=BEFORE, queue=None):
    net = Net(MaybeOutfeedQueue())
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    return net, OutfeedOptimizer(sgd, queue or MaybeOutfeedQueue(), mode)


def test_set_optimizer_takes_new_values_of_the_same_wrapper():
    net, optimizer = wrapped()
    training = poptorch.trainingModel(net, make_options(1, 1, ReductionType.Mean), optimizer)
    training(*data(1, torch.float32))
    before = copy.deepcopy(net.state_dict())
    optimizer.param_groups[0]["lr"] = 0.0
    training.setOptimizer(optimizer)
    training(*data(1, torch.float32))
    assert torch.equal(before["a.weight"], net.state_dict()["a.weight"])
    assert optimizer.queue.dequeue()["a.weight_grad"].shape == (2 * ITERATIONS, 3, 4)


def test_set_optimizer_refuses_what_captures_otherwise():
    net, optimizer = wrapped()
    training = poptorch.trainingModel(net, make_options(1, 1, ReductionType.Mean), optimizer)
    training(*data(1, torch.float32))
    with pytest.raises(Error, match=r"compiled with OutfeedOptimizer \(BEFORE_APPLY\), the new"):
        training.setOptimizer(optimizer.wrapped)
    other = OutfeedOptimizer(optimizer.wrapped, optimizer.queue, AFTER)
    with pytest.raises(Error, match=r"has OutfeedOptimizer \(AFTER_COMPUTE\)"):
        training.setOptimizer(other)
    training(*data(1, torch.float32))


def test_a_schedule_drives_the_device():
    net, optimizer = wrapped()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.0)
    training = poptorch.trainingModel(net, make_options(1, 1, ReductionType.Mean), optimizer)
    training(*data(1, torch.float32))
    before = copy.deepcopy(net.state_dict())
    schedule.step()
    training.setOptimizer(optimizer)
    training(*data(1, torch.float32))
    assert torch.equal(before["b.bias"], net.state_dict()["b.bias"])


def test_the_state_of_the_device_is_in_the_wrappers_dictionary():
    net = Net(MaybeOutfeedQueue())
    adam = poptorch.optim.AdamW(net.parameters(), lr=0.1)
    optimizer = OutfeedOptimizer(adam, MaybeOutfeedQueue())
    training = poptorch.trainingModel(net, make_options(1, 1, ReductionType.Mean), optimizer)
    training(*data(1, torch.float32))
    state = optimizer.state_dict()["ipu_state"]
    assert state["Accl1___a.weight"].abs().sum() > 0
    assert state["Step___a.weight"] == ITERATIONS


def test_a_bound_optimizer_needs_the_model():
    net = Net(MaybeOutfeedQueue())
    adam = poptorch.optim.AdamW(net.parameters(), lr=0.1)
    training = poptorch.trainingModel(net, make_options(1, 1, ReductionType.Mean), adam)
    training(*data(1, torch.float32))
    with pytest.raises(ValueError, match="the model must be specified"):
        OutfeedOptimizer(adam, MaybeOutfeedQueue())
    assert OutfeedOptimizer(adam, MaybeOutfeedQueue(), model=training).model is net


def test_names_are_those_of_the_model_that_was_given():
    body = nn.Linear(3, 2)
    queue = MaybeOutfeedQueue()
    sgd = torch.optim.SGD(body.parameters(), lr=0.1)
    options = make_options(1, 1, ReductionType.Mean)
    options.anchored_tensors.clear()
    training = poptorch.trainingModel(
        Wrapping(body), options, OutfeedOptimizer(sgd, queue, model=body)
    )
    training(torch.ones(3, 3))
    assert [*queue.dequeue()] == ["bias_grad", "weight_grad"]


class Wrapping(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return poptorch.identity_loss(self.body(x), "sum")


def test_gradients_need_a_queue_of_their_own():
    queue = MaybeOutfeedQueue()
    net = Net(queue)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    options = make_options(1, 1, ReductionType.Mean)
    training = poptorch.trainingModel(net, options, OutfeedOptimizer(sgd, queue))
    with pytest.raises(Error, match="enqueues to its queue already"):
        training(*data(1, torch.float32))


def test_a_model_without_a_final_layer_is_told_of(caplog):
    queue = MaybeOutfeedQueue()
    net = Net(queue)
    net.last.final_outfeed = False
    with caplog.at_level(logging.WARNING, "poptorch::python"):
        options = poptorch.Options().deviceIterations(2)
        poptorch.inferenceModel(net, options)(torch.ones(2, 4), torch.ones(2, 2))
    assert any("'hidden', 'out' wait to be enqueued" in r.getMessage() for r in caplog.records)
    assert queue.maybe_dequeue() is None


def test_gradients_do_not_mix_with_values_that_wait():
    queue = MaybeOutfeedQueue()
    net = Net(queue)
    net.last.final_outfeed = False
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    options = make_options(1, 1, ReductionType.Mean)
    training = poptorch.trainingModel(net, options, OutfeedOptimizer(sgd, queue))
    with pytest.raises(Error, match="never enqueued: 'hidden', 'out'"):
        training(*data(1, torch.float32))


def test_a_copy_of_an_executor_captures_too():
    net, optimizer = wrapped()
    training = poptorch.trainingModel(net, make_options(1, 1, ReductionType.Mean), optimizer)
    other = copy.deepcopy(training)
    other(*data(1, torch.float32))
    assert optimizer.queue.dequeue()["b.bias_grad"].shape == (ITERATIONS, 2)


def test_an_anchor_may_be_asked_for_by_the_key_of_a_queue():
    net, optimizer = wrapped(AFTER)
    options = make_options(1, 1, ReductionType.Mean)
    options.anchorTensor("same", "b.weight_grad", poptorch.OutputMode.All)
    training = poptorch.trainingModel(net, options, optimizer)
    training(*data(1, torch.float32))
    found = optimizer.queue.dequeue()["b.weight_grad"]
    assert torch.equal(training.getAnchoredTensor("same"), found.flatten(0, 1))


def test_a_program_of_a_file_cannot_capture(tmp_path):
    body = nn.Linear(3, 2)
    sgd = torch.optim.SGD(body.parameters(), lr=0.1)
    training = poptorch.trainingModel(Wrapping(body), poptorch.Options(), sgd)
    training(torch.ones(3, 3))
    training.save(tmp_path / "file")
    training.destroy()
    loaded = poptorch.load(tmp_path / "file")
    module = loaded.model
    loaded.destroy()
    optimizer = OutfeedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), MaybeOutfeedQueue())
    other = poptorch.trainingModel(module, poptorch.Options(), optimizer)
    with pytest.raises(Error, match="enqueues no gradients"):
        other.loadExecutable(tmp_path / "file")
