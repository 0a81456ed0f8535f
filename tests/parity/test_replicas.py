"""Replicas: copies of a model on other micro-batches train as one copy on all of them."""

import threading

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.optim import SGD
from tests.parity.replicas import (
    GA,
    MICRO_BATCH,
    OPTIMIZERS,
    D,
    Model,
    R,
    close,
    data,
    options_of,
    sgd,
    trained,
    wrap,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_train_as_one_with_more_accumulation(name):
    """Also the masks of dropout are those of one replica."""
    expected = trained(1, OPTIMIZERS[name])
    for replicas in (2, 4):
        close(trained(replicas, OPTIMIZERS[name]), expected, rtol=2e-4, atol=1e-5)


ANCHORED = ("Gradient___layers.1.weight", "UpdatedVar___layers.4.weight", "layers.1.bias")


def anchor(options):
    for name in ANCHORED:
        for mode in ("All", "Sum", "Final"):
            options.anchorTensor(f"{name} {mode}", name, output_mode=poptorch.OutputMode[mode])


def anchor_every_second(options):
    anchor(options)
    options.anchorTensor(
        "every", ANCHORED[0], output_mode=poptorch.OutputMode.EveryN, output_return_period=2
    )


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("num_threads", [2, 3, 4, 8])
def test_threads_change_no_bit(num_threads, stages, threads):
    replicas = 4 if stages == 1 else 2  # a pipeline needs several micro-batches
    more = {"stages": stages, "change": anchor}
    if stages > 1:
        more["schedule"] = PipelineSchedule.Interleaved
    threads(1)
    expected = trained(replicas, **more)
    threads(num_threads)
    found = trained(replicas, **more)
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_teams_and_lanes_share_the_threads(threads, monkeypatch):
    plans = []
    threads(8)
    for num_threads in (1, 2, 4, 8):
        monkeypatch.setenv("POPSIM_STAGE_THREADS", str(num_threads))
        _, training = wrap(2, stages=2, schedule=PipelineSchedule.Interleaved)
        training.compile(*data()[0])
        plan = training.compiled.executable.plan
        plans.append((plan.num_teams, len(set(plan.lane_of_stage))))
        training.destroy()
    assert plans == [(1, 1), (2, 1), (2, 2), (2, 2)]


def test_anchors_have_an_entry_for_each_replica():
    """In the order of the rows of the inputs; sums and last values are those of a replica."""
    found, one = (trained(replicas, change=anchor_every_second) for replicas in (4, 1))
    shape = (D, GA, R, 8, 6)
    gradients = found[f"{ANCHORED[0]} All"].reshape(shape)
    torch.testing.assert_close(
        gradients, one[f"{ANCHORED[0]} All"].reshape(shape), rtol=2e-4, atol=1e-5
    )
    sums = found[f"{ANCHORED[0]} Sum"].reshape(R, 8, 6)
    torch.testing.assert_close(sums, gradients.sum((0, 1)), rtol=1e-5, atol=1e-6)
    assert torch.equal(found[f"{ANCHORED[0]} Final"].reshape(R, 8, 6), gradients[-1, -1])
    assert torch.equal(found["every"].reshape(1, GA, R, 8, 6)[0], gradients[1])
    weights = found[f"{ANCHORED[1]} All"].reshape(D, GA, R, 8, 8)
    assert torch.equal(weights, weights[:, :1, :1].expand_as(weights))
    assert torch.equal(weights[-1, 0, 0], found["layers.4.weight"])
    assert torch.equal(found[f"{ANCHORED[1]} Final"].reshape(R, 8, 8), weights[-1, -1])


@pytest.mark.parametrize("reduction", ["Mean", "Sum"])
@pytest.mark.parametrize("strategy", ["Post", "Running"])
def test_gradients_are_reduced_as_those_of_micro_batches(reduction, strategy):
    def change(options):
        training = options.Training
        training.accumulationAndReplicationReductionType(poptorch.ReductionType[reduction])
        training.setMeanAccumulationAndReplicationReductionStrategy(
            poptorch.MeanReductionStrategy[strategy]
        )

    make = OPTIMIZERS["sgd"]
    close(trained(4, make, change=change), trained(1, make, change=change), rtol=2e-4, atol=1e-5)


def test_without_accumulation_replicas_accumulate():
    found = {}
    for replicas, accumulation in ((4, 1), (1, 4)):
        model, options = Model(), options_of(replicas, accumulation)
        options.anchorTensor("sum", "FinalReducedGradient___layers.1.weight")
        training = poptorch.trainingModel(model, options, OPTIMIZERS["sgd"](model))
        training(*data(MICRO_BATCH * D * 4)[0])
        found[replicas] = model.layers[1].weight.detach().clone()
        assert "layers.1.weight_reducedGrad" in training.getTensorNames() or replicas == 1
        training.destroy()
    torch.testing.assert_close(found[4], found[1], rtol=2e-4, atol=1e-5)


def test_an_error_in_a_replica_leaves_whole_iterations(threads):
    threads(2)
    model = Model()
    training = poptorch.trainingModel(model, options_of(2, 2), sgd(model))
    x, y = data(MICRO_BATCH * D * 4)[0]
    training(x, y)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    num_threads = threading.active_count()
    wrong = x.clone()
    wrong[-1] = 99
    with pytest.raises(poptorch.Error, match=r"layers\.0|embedding|index"):
        training(wrong, y)
    assert threading.active_count() == num_threads
    training(x, y)
    assert any(not torch.equal(v, before[n]) for n, v in model.state_dict().items())
    training.destroy()


def test_programs_of_several_replicas_are_saved(tmp_path):
    x = data()[0]
    expected = trained(4)
    _, training = wrap(4)
    training.compile(*x)
    training.save(str(tmp_path / "model"), export_model=True)
    training.destroy()
    loaded = poptorch.load(str(tmp_path / "model"))
    for i, one in enumerate(data()):
        assert torch.equal(loaded(*one)[0], expected[f"call {i}"])


def test_automatic_loss_scaling_counts_all_replicas():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 2).half()

        def forward(self, x):
            out = self.linear(x)
            return out, poptorch.identity_loss(out.square().mean(), reduction="none")

    found = {}
    for replicas, accumulation in ((4, 1), (1, 4)):
        model, options = Half(), options_of(replicas, accumulation)
        options.Training.setAutomaticLossScaling(True)
        optimizer = SGD(model.parameters(), lr=0.1, loss_scaling=64.0)
        training = poptorch.trainingModel(model, options, optimizer)
        torch.manual_seed(0)
        for _ in range(4):
            training(torch.randn(D * 4 * 3, 4).half())
        found[replicas] = model.linear.weight.detach().float()
        training.destroy()
    torch.testing.assert_close(found[4], found[1], rtol=2e-2, atol=1e-3)


def test_too_many_ipus():
    model = Model()
    options = options_of(65, 1)
    training = poptorch.trainingModel(model, options, sgd(model))
    with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(65\)"):
        training(*data(MICRO_BATCH * D * 65)[0])


def test_a_call_with_too_few_rows_names_the_replicas():
    _, training = wrap(4)
    with pytest.raises(AssertionError, match=r"replicationFactor \(R=4\)"):
        training(*(one[:-1] for one in data()[0]))
