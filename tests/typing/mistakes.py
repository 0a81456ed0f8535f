"""Mistakes of users that type checkers find: each line with ``# error:`` and no other."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import popsim_torch as poptorch

Tensor = torch.Tensor


class Net(nn.Module):
    """Returns logits and a loss."""

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return x, labels


training = poptorch.trainingModel(Net(), poptorch.Options())
training("text", torch.ones(1))  # error: arg-type
training(torch.ones(1))  # error: call-arg
training(torch.ones(1), torch.ones(1), mask=None)  # error: call-arg
total: Tensor = training(torch.ones(1), torch.ones(1))  # error: assignment
training.getAnchoredTensor(3)  # error: arg-type
training.setOptimizer("SGD")  # error: arg-type
poptorch.trainingModel("model")  # error: call-overload
poptorch.inferenceModel(Net(), {"deviceIterations": 2})  # error: call-overload
poptorch.inferenceModel(training)(torch.ones(1))  # error: call-arg


@poptorch.function
def epoch(count: int, x: Tensor) -> Tensor:
    return x * count


class Trainer:
    """Has a device loop as a method."""

    @poptorch.function(options=poptorch.Options())
    def run(self, x: Tensor) -> Tensor:
        return x


epoch("three", torch.ones(1))  # error: arg-type
epoch(3)  # error: call-arg
count: int = epoch(3, torch.ones(1))  # error: assignment
Trainer().run(3)  # error: arg-type
Trainer().run(torch.ones(1), 2)  # error: call-arg
poptorch.function(options=3)  # error: call-overload
poptorch.Options().deviceIterations("4")  # error: arg-type
poptorch.Options().anchorTensor("all", 3)  # error: arg-type
poptorch.tensors.gradients() & 3  # error: operator
poptorch.Options().outputMode("All")  # error: arg-type
poptorch.Options().deviceIteration(4)  # error: attr-defined
mode = poptorch.OutputMode.Al  # error: attr-defined
poptorch.OutfeedQueue(when_full=3)  # error: arg-type
poptorch.MaybeOutfeedQueue(filters=[3])  # error: list-item
poptorch.Stage(1)  # error: arg-type
poptorch.optim.SGD(Net().parameters(), lr="0.1")  # error: arg-type
poptorch.DataLoader(torch.ones(1), TensorDataset())  # error: arg-type
