"""The same training as an executor, with ``fit``, as a function, and with PyTorch."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.records import Run, compare, eager_record

STEPS = 4


class Loss(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels):
        return nn.functional.cross_entropy(self.net(x), labels)


def model():
    torch.manual_seed(0)
    return Loss(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator))
        for _ in range(STEPS)
    ]


def executor_of(net, rate, path):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    training = poptorch.trainingModel(net, optimizer=optimizer)
    training.record(path)
    return training


def by_executor(net, rate, path):
    training = executor_of(net, rate, path)
    for batch in batches():
        training(*batch)
    training.close_sinks()


def by_fit(net, rate, path):
    poptorch.fit(executor_of(net, rate, path), batches(), verbose=0)


def run_function(net, loss_of, rate, path):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    queue = poptorch.InfeedQueue(batches())

    def step(x, labels):
        optimizer.zero_grad()
        loss_of(x, labels).backward()
        optimizer.step()

    @poptorch.function
    def train():
        poptorch.repeat(STEPS, step, [], queue)

    train.record(path)
    train()
    train.close_sinks()


def by_function(net, rate, path):
    run_function(net, lambda x, labels: net(x, labels), rate, path)


def by_function_without_the_loss(whole, rate, path):
    net = whole.net
    run_function(net, lambda x, labels: nn.functional.cross_entropy(net(x), labels), rate, path)


def by_pytorch(net, rate, path):
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    with eager_record(net, path, optimizer=optimizer):
        for batch in batches():
            optimizer.zero_grad()
            net(*batch).backward()
            optimizer.step()


FORMS = [by_executor, by_fit, by_function, by_function_without_the_loss, by_pytorch]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the run of each form, and that with another learning rate."""
    folder = tmp_path_factory.mktemp("runs")

    def run(form, rate):
        path = folder / f"{form.__name__}_{rate}.popsim"
        form(copy.deepcopy(model()), rate, path)
        return Run(path)

    return {form: (run(form, 0.1), run(form, 0.2)) for form in FORMS}


@pytest.mark.parametrize("one", FORMS)
@pytest.mark.parametrize("other", FORMS)
def test_all_forms_correspond(one, other, runs):
    same = compare(runs[one][0], runs[other][0], tolerance=1e-4)
    assert same.equal, str(same)
    updated = [name for name in runs[one][0].names if name.startswith("UpdatedVar___")]
    gradients = [name for name in runs[one][0].names if name.startswith("Gradient___net.")]
    assert len(updated) == 4 and set(same.only_in_a).isdisjoint([*updated, *gradients])
    outputs = [name for name in runs[one][0].names if "Gemm" in name or name == "net.0"]
    assert outputs and set(same.only_in_a).isdisjoint(outputs)
    changed = compare(runs[one][0], runs[other][1], tolerance=1e-4)
    assert changed.first.step == 0 and changed.first.micro_batch is None
    assert changed.first.module.endswith("net.0")


def test_programs_of_one_machine_have_the_same_bits(runs):
    for other in (by_fit, by_function):
        found = compare(runs[by_executor][0], runs[other][0])
        assert found.equal and found.by_value == 0 and not found.missing
