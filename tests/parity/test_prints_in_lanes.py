"""Stages that print at the same time: the text is that of one thread, to the last character."""

import re

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from tests.options import make_options
from tests.parity.test_pipeline_combinations import Late, load_late

PIPELINED = [one for one in PipelineSchedule if one != PipelineSchedule.Sequential]


class Prints(nn.Module):
    """Each stage takes a random time, and prints its result and the gradient of it."""

    def __init__(self):
        super().__init__()
        load_late()
        torch.manual_seed(0)
        self.table, self.late = nn.Embedding(10, 3), Late()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x):
        h = self.table(x)
        for stage, layer in enumerate(self.layers):
            poptorch.Block.start(f"stage{stage}", ipu_id=stage)
            h = poptorch.ipu_print_tensor(self.late(layer(h)), f"stage{stage}")
        return h, poptorch.identity_loss(h.square(), "mean")


def text_of(executor, x, capfd):
    """Return what a call writes, and the error it ends with, if it does."""
    capfd.readouterr()
    told = ""
    try:
        executor(x)
    except poptorch.Error as error:
        told = str(error)
    return re.sub(r"\[\d\d:.*\n", "", capfd.readouterr().err), told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("schedule", PIPELINED)
def test_the_text_is_that_of_one_thread(schedule, training, threads, capfd):
    good = torch.arange(24) % 10
    bad = good.clone()
    bad[17] = 10  # a row that the table does not have
    found = []
    for num_threads in (1, 3):
        threads(num_threads)
        options = make_options(1 if training else 24, 24 if training else 1)
        options.autoRoundNumIPUs(True).pipelineSchedule(schedule)
        model = Prints()
        if training:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            executor = poptorch.trainingModel(model, options, optimizer)
        else:
            executor = poptorch.inferenceModel(model, options)
        found.append([text_of(executor, x, capfd) for x in (good, bad, good)])
        lanes = executor.compiled.executable.plan.lane_of_stage
        executor.destroy()
    assert lanes == [0, 1, 2]
    assert found[0] == found[1]
    (text, no_error), (shorter, error), _ = found[0]
    assert len(re.findall("stage1:", text)) == 24
    assert 17 <= len(re.findall("stage0:", shorter)) < 24
    assert "out of range" in error and not no_error
