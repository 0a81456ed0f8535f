"""A model of layers, each a stage of its own, that tests of pipelines wrap."""

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from tests.options import make_options

WIDTH, MICRO_BATCH = 6, 2


class Layers(nn.Module):
    """Some linear layers; the loss is that of the last one."""

    def __init__(self, count):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)
        )

    def forward(self, x):
        for stage, layer in enumerate(self.layers):
            poptorch.Block.start(f"stage{stage}")
            x = layer(x)
        return poptorch.identity_loss(x.square(), "mean")


def wrap(
    num_stages,
    *,
    ga=8,
    d=1,
    schedule=PipelineSchedule.Default,
    training=True,
    ipus=None,
    replicas=1,
    **anchors,
):
    """Return an executor, and an argument of its call.

    Args:
        num_stages: The number of stages.
        ga: Micro-batches per weight update.
        d: Device iterations.
        schedule: The schedule.
        training: Whether to wrap for training.
        ipus: The IPU of each stage.
        replicas: The number of replicas.
        **anchors: The long name, and perhaps the mode and the period, by the short name.
    """
    options = make_options(d, ga if training else 1, seed=1).autoRoundNumIPUs(True)
    options.pipelineSchedule(schedule)
    stages = [
        poptorch.Stage(f"stage{stage}").ipu(ipu)
        for stage, ipu in enumerate(ipus or range(num_stages))
    ]
    options.setExecutionStrategy(poptorch.PipelinedExecution(*stages))
    options.replicationFactor(replicas)
    for short, (name, *mode) in anchors.items():
        options.anchorTensor(short, name, *mode)
    model = Layers(num_stages)
    x = torch.randn(d * (ga if training else 1) * replicas * MICRO_BATCH, WIDTH)
    if not training:
        return poptorch.inferenceModel(model.eval(), options), x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    return poptorch.trainingModel(model, options, optimizer), x


def compiled(*args, **kwargs):
    """Return the executor of ``wrap``, compiled."""
    executor, x = wrap(*args, **kwargs)
    executor.compile(x)
    return executor
