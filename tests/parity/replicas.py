"""Programs of several replicas, for tests."""

import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.optim import LAMB, SGD, Adam, AdamW, RMSprop
from tests.options import make_options

D, GA, R, MICRO_BATCH = 3, 2, 4, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Embedding(10, 6),
            nn.Linear(6, 8),
            nn.Dropout(0.25),
            nn.Tanh(),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x, y):
        out = self.layers(x)
        return out, nn.functional.cross_entropy(out, y)


def data(rows=MICRO_BATCH * D * GA * R, calls=2):
    torch.manual_seed(1)
    return [(torch.randint(0, 10, (rows,)), torch.randint(0, 3, (rows,))) for _ in range(calls)]


def options_of(replicas, accumulation=None, iterations=D):
    """Return options of a program that takes the same rows for each number of replicas."""
    if accumulation is None:
        accumulation = GA * R // replicas
    options = make_options(iterations, accumulation, seed=3)
    options.replicationFactor(replicas).autoRoundNumIPUs(True)
    return options.outputMode(poptorch.OutputMode.All)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def wrap(replicas, make_optimizer=sgd, stages=1, schedule=None, change=None):
    model, options = Model(), options_of(replicas)
    if schedule is not None:
        options.pipelineSchedule(schedule)
    if change is not None:
        change(options)
    if stages > 1:
        poptorch.set_pipeline_stage_assignment(model.layers, [i * stages // 6 for i in range(6)])
    return model, poptorch.trainingModel(model, options, make_optimizer(model))


def trained(replicas, *args, **more):
    """Train, and return outputs, weights and optimizer states."""
    model, training = wrap(replicas, *args, **more)
    found = {f"call {i}": training(*one)[0] for i, one in enumerate(data())}
    found |= {name: training.getAnchoredTensor(name) for name in training.options.anchored_tensors}
    found |= {name: value.clone() for name, value in model.state_dict().items()}
    training.destroy()
    return found


def close(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "weight decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, weight_decay=0.1),
    "combined": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, use_combined_accum=True),
    "separate": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, use_combined_accum=False),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "scaled": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9, loss_scaling=64.0),
    "clipped": lambda m: Adam(m.parameters(), lr=0.05, max_grad_norm=0.5),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.05),
    "adamw": lambda m: AdamW(m.parameters(), lr=0.05, weight_decay=0.1),
    "rmsprop": lambda m: RMSprop(m.parameters(), lr=0.01, centered=True),
    "lamb": lambda m: LAMB(m.parameters(), lr=0.05),
}
