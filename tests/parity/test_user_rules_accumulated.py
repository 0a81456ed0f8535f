"""Hooks behind accumulation: they see and change the gradient that the optimizer gets."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

NAMES = ("first.weight", "last.bias")
MICRO_BATCHES = [1, 4]


def scales(parameter):
    parameter.grad.mul_(0.5)


def clamps(parameter):
    parameter.grad.clamp_(-0.02, 0.02)


def replaces(parameter):
    parameter.grad = parameter.grad * 2


def removes(parameter):
    parameter.grad = None


def reads(parameter):
    parameter.grad.norm()


def decays(parameter):
    parameter.grad.add_(parameter, alpha=0.1)


def clears_a_part(parameter):
    parameter.grad[0] = 0


def steps_itself(parameter):
    parameter.add_(parameter.grad, alpha=-0.1)


HOOKS = [scales, clamps, replaces, removes, reads, decays, clears_a_part, steps_itself]


class Model(nn.Module):
    def __init__(self, hook, names=NAMES):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        for name in names:
            self.get_parameter(name).register_post_accumulate_grad_hook(hook)

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.last(self.first(x).tanh()), y)


def batches():
    torch.manual_seed(1)
    return [(torch.randn(16, 4), torch.randint(3, (16,))) for _ in range(3)]


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def calls(model, options, optimizer=momentum):
    executor = poptorch.trainingModel(model, options, optimizer(model))
    for batch in batches():
        executor(*batch)
    return executor


def eager(hook, micro_batches=1, *, optimizer=momentum, divisor=None):
    model = Model(hook)
    steps = optimizer(model)
    for batch in batches():
        steps.zero_grad()
        for x, y in zip(*(part.chunk(micro_batches) for part in batch), strict=True):
            (model(x, y) / (divisor or micro_batches)).backward()
        steps.step()
    return model


def assert_alike(model, expected):
    torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()))


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_behind_accumulation_work_as_in_eager_pytorch(hook, micro_batches):
    model = Model(hook)
    calls(model, make_options(ga=micro_batches))
    assert_alike(model, eager(hook, micro_batches))


def in_a_loop(model):
    optimizer, queue = momentum(model), poptorch.InfeedQueue(batches())

    def body(x, y):
        optimizer.zero_grad()
        model(x, y).backward()
        optimizer.step()

    poptorch.function(lambda: poptorch.repeat(3, body, infeed=queue))()


def fits(model):
    poptorch.fit(model, batches(), optimizer=momentum(model), verbose=0)


@pytest.mark.parametrize("train", [in_a_loop, fits])
@pytest.mark.parametrize("hook", HOOKS)
def test_other_ways_to_train_run_the_same_hooks(train, hook):
    model = Model(hook)
    train(model)
    assert_alike(model, eager(hook))


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def adagrad(model):
    return torch.optim.Adagrad(model.parameters(), lr=0.01)


@pytest.mark.parametrize("optimizer", [adamw, adagrad])
def test_every_optimizer_gets_the_changed_gradient(optimizer):
    model = Model(clamps)
    calls(model, make_options(ga=2), optimizer)
    assert_alike(model, eager(clamps, 2, optimizer=optimizer))


def test_with_a_sum_hooks_see_the_sum():
    model, options = Model(clamps), make_options(ga=4)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    calls(model, options)
    assert_alike(model, eager(clamps, 4, divisor=1))


@pytest.mark.parametrize("hook", [scales, reads])
def test_stages_run_the_hooks_of_their_parameters(hook):
    model = Model(hook)
    model.last = poptorch.BeginBlock(model.last, ipu_id=1)
    calls(model, make_options(ga=4))
    assert_alike(model, eager(hook, 4))


def test_each_replica_has_its_own_gradient():
    model, options = Model(clamps), make_options(ga=2)
    options.replicationFactor(2)
    calls(model, options)
    expected = Model(clamps)
    steps = momentum(expected)
    for batch in batches():
        totals = {name: torch.zeros_like(p) for name, p in expected.named_parameters()}
        for replica in range(2):
            steps.zero_grad()
            for x, y in zip(*(part.chunk(4)[replica::2] for part in batch), strict=True):
                (expected(x, y) / 2).backward()
            for name, parameter in expected.named_parameters():
                totals[name] += parameter.grad / 2
        for name, parameter in expected.named_parameters():
            parameter.grad = totals[name]
        steps.step()
    assert_alike(model, expected)


@pytest.mark.parametrize("micro_batches", MICRO_BATCHES)
def test_a_hook_enqueues_the_gradient_after_each_micro_batch(micro_batches):
    queue, seen = poptorch.OutfeedQueue(), []
    calls(Model(lambda p: queue.enqueue(p.grad), NAMES[1:]), make_options(ga=micro_batches))
    eager_model = Model(lambda p: seen.append(p.grad.clone()), NAMES[1:])
    steps = momentum(eager_model)
    for batch in batches():
        steps.zero_grad()
        for x, y in zip(*(part.chunk(micro_batches) for part in batch), strict=True):
            (eager_model(x, y) / micro_batches).backward()
        steps.step()
    torch.testing.assert_close(queue.dequeue().reshape(-1, 3), torch.stack(seen))


def test_an_anchor_shows_the_gradient_behind_the_hook():
    options = make_options()
    options.anchorTensor("gradient", "Gradient___first.weight")
    executor = calls(Model(clamps), options)
    assert executor.getAnchoredTensor("gradient").abs().max() == torch.tensor(0.02)


def test_forward_registers_a_hook():
    class Registers(Model):
        def forward(self, x, y):
            self.first.weight.register_post_accumulate_grad_hook(scales)
            return super().forward(x, y)

    model = Registers(scales, NAMES[1:])
    calls(model, make_options())
    assert_alike(model, eager(scales))


def test_a_frozen_parameter_has_no_gradient_to_see():
    model = Model(replaces)
    model.last.bias.requires_grad_(False)
    model.first.weight.requires_grad_(False)
    before = model.last.bias.clone()
    calls(model, make_options())
    assert torch.equal(model.last.bias, before)
    assert torch.isfinite(poptorch.inferenceModel(model, make_options())(*batches()[0]))


def test_an_optimizer_in_backward_is_refused():
    model = Model(reads)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    with pytest.raises(poptorch.Error, match=r"'first.weight' at .* steps the optimizer SGD"):
        calls(model, make_options())


def test_a_hook_that_changes_its_parameter_in_a_pipeline_is_refused():
    model = Model(steps_itself)
    model.last = poptorch.BeginBlock(model.last, ipu_id=1)
    with pytest.raises(poptorch.Error, match=r"changes the parameter '.*With 2 pipeline stages"):
        calls(model, make_options(ga=4))


def combined(model):
    return poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, use_combined_accum=True)


def test_combined_accumulation_has_no_gradient_to_see():
    with pytest.raises(poptorch.Error, match="Leave out use_combined_accum"):
        calls(Model(scales), make_options(ga=4), combined)


def test_a_parameter_that_is_not_updated_accumulates_nothing():
    with pytest.raises(poptorch.Error, match="the optimizer does not update it"):
        calls(
            Model(scales),
            make_options(ga=2),
            lambda model: torch.optim.Adagrad([model.first.bias, model.last.bias], lr=0.1),
        )


def test_a_hook_that_returns_something_is_refused_as_in_eager_pytorch():
    with pytest.raises(RuntimeError, match="hooks should return None"):
        calls(Model(lambda parameter: parameter.grad), make_options())
    with pytest.raises(RuntimeError, match="hooks should return None"):
        eager(lambda parameter: parameter.grad)


def test_a_hook_that_reads_values_is_refused():
    with pytest.raises(poptorch.Error, match="does not exist while the model is traced"):
        calls(Model(lambda p: print(p.grad.norm().item())), make_options())
