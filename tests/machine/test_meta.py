"""Estimates of models whose tensors are on the device ``meta``: they have no values."""

import json
import os
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.machine.bert import bert_estimate
from tests.options import make_options
from tests.unit.executor.nets import Net

OPTIMIZERS = {
    "SGD": lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "RMSprop": torch.optim.RMSprop,
    "poptorch.SGD": lambda weights: poptorch.optim.SGD(weights, lr=0.1, momentum=0.9),
    "poptorch.combined": lambda weights: poptorch.optim.SGD(
        weights, lr=0.1, momentum=0.9, use_combined_accum=True
    ),
    "poptorch.Adam": poptorch.optim.Adam,
    "poptorch.AdamW": lambda weights: poptorch.optim.AdamW(weights, accum_type=torch.float16),
    "poptorch.RMSprop": poptorch.optim.RMSprop,
    "poptorch.LAMB": poptorch.optim.LAMB,
}


def figures(estimate):
    """Return an estimate as data, without the lines of this file."""
    data = estimate.as_dict()
    for op in data["ops"]:
        del op["source"]
    return data


def on_meta(make=Net):
    with torch.device("meta"):
        return make()


def meta_batch(size=6):
    x = torch.empty(size, 4, device="meta")
    return x, torch.empty(size, dtype=torch.int64, device="meta")


def real_batch(size=6):
    return torch.zeros(size, 4), torch.zeros(size, dtype=torch.int64)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_costs_the_same_with_and_without_values(name):
    with torch.device("meta"):
        model = Net()
    optimizer = OPTIMIZERS[name](model.parameters())
    without = poptorch.estimate(model, meta_batch(), optimizer=optimizer)
    real = Net()
    optimizer = OPTIMIZERS[name](real.parameters())
    with_values = poptorch.estimate(real, real_batch(), optimizer=optimizer)
    assert without.training
    assert without.as_dict() == with_values.as_dict()


def test_inference_costs_the_same_with_and_without_values():
    without = poptorch.estimate(on_meta(), meta_batch()[0])
    with_values = poptorch.estimate(Net(), real_batch()[0])
    assert not without.training
    assert without.as_dict() == with_values.as_dict()


def test_parameters_that_were_never_initialised():
    linear = torch.nn.utils.skip_init(nn.Linear, 4, 3)
    same = poptorch.estimate(nn.Linear(4, 3), torch.zeros(6, 4))
    assert figures(poptorch.estimate(linear, torch.zeros(6, 4))) == figures(same)


def test_parameters_on_meta_with_arguments_on_the_host():
    assert poptorch.estimate(on_meta(), real_batch()[0]).cycles > 0


def test_a_training_executor_estimates_a_model_on_meta_and_refuses_to_run_it():
    model = poptorch.trainingModel(on_meta(), make_options())
    assert model.estimate(*meta_batch()).training
    for use in (model, model.compile):
        with pytest.raises(poptorch.Error, match=r"'fc1\.weight' is on the device 'meta'"):
            use(*real_batch())
    assert not model.isCompiled()


def test_a_call_with_an_argument_on_meta_is_refused():
    model = poptorch.inferenceModel(Net(), make_options())
    with pytest.raises(poptorch.Error, match="Input x is on device meta"):
        model(meta_batch()[0])


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))

    def forward(self, x):
        return self.linear(x)[:, self.mask]


def test_a_buffer_whose_values_the_trace_needs_is_named():
    model = on_meta(Masked)
    x = torch.empty(2, 4, device="meta")
    with pytest.raises(poptorch.Error, match=r"needs the value of 'mask'.*on the CPU"):
        poptorch.estimate(model, x)
    model.mask = torch.tensor([True, False, True, True])
    assert poptorch.estimate(model, x).cycles > 0


def test_buffers_that_only_the_device_reads_may_be_on_meta():
    def make():
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))

    x = torch.empty(6, 4, device="meta")
    same = poptorch.estimate(make(), torch.zeros(6, 4))
    assert figures(poptorch.estimate(on_meta(make), x)) == figures(same)


def test_estimating_changes_no_random_number_and_no_weight():
    model, (x, y) = Net(), real_batch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    poptorch.estimate(model, (x, y), optimizer=torch.optim.Adam(model.parameters()))
    assert torch.equal(torch.rand(4), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# --- BERT-Large ---------------------------------------------------------------------------------

SCRIPT = """
import json, resource, time
from tests.machine.bert import bert_estimate
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
bert_estimate(1, hidden=64)
before, began = peak(), time.perf_counter()
estimate = bert_estimate(24)
print(json.dumps([time.perf_counter() - began, peak() - before, estimate.verdict]))
"""


@pytest.mark.slow
def test_bert_large_takes_neither_long_nor_memory():
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)],
        env={**os.environ, "POPTORCH_LOG_LEVEL": "ERR"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, grown, verdict = json.loads(found.stdout.splitlines()[-1])
    assert seconds < 30
    assert grown < 150e6
    assert verdict == "does not fit"  # 1.3 GB of weights on one IPU


@pytest.mark.slow
def test_the_time_of_an_estimate_grows_linearly():
    bert_estimate(1, hidden=64)
    times = []
    for layers in (4, 16):
        began = time.perf_counter()
        bert_estimate(layers, hidden=64)
        times.append(time.perf_counter() - began)
    assert times[1] < 8 * times[0]


def test_a_pipeline_of_four_stages_with_recomputation():
    options = make_options(1, 16)
    options._Popart.set("autoRecomputation", 3)
    estimate = bert_estimate(8, stages=4, sequences=8 * 16, options=options)
    assert [ipu.stages for ipu in estimate.ipus] == [(0,), (1,), (2,), (3,)]
    assert any(op.recomputed for op in estimate.ops)
    assert estimate.batch.items_per_call == 8 * 16
