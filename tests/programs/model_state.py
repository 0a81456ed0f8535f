"""State of a model: batch norm that counts, masks in buffers, frozen layers."""

import copy

import poptorch
import torch


def halve(x):
    return x / 2


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.encoder = torch.nn.Linear(6, 8)
        self.halve = poptorch.BeginBlock(halve, "second", ipu_id=1)
        self.norm = torch.nn.BatchNorm1d(8, momentum=None)
        self.register_buffer("kept", torch.arange(8) % 2 == 0)
        self.head = torch.nn.Linear(4, 3)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        with poptorch.Block("first", ipu_id=0):
            x = torch.relu(self.encoder(x))
        x = self.norm(self.halve(x))[:, self.kept]
        factor = torch.tensor(x.shape[1])
        if factor > 3:
            x = x * factor.item()
        x = self.head(x)
        return x if labels is None else (x, self.loss(x, labels))


def options(accumulation):
    result = poptorch.Options().showCompilationProgressBar(False)
    result.deviceIterations(2)
    result.Training.gradientAccumulation(accumulation)
    return result


def train(model, steps=3):
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options(4), optimizer)
    generator = torch.Generator().manual_seed(9)
    x, labels = torch.randn(64, 6, generator=generator), torch.arange(64) % 3
    losses = [float(training(x, labels)[1].mean()) for _ in range(steps)]
    training.destroy()
    return losses


model = Model()
losses = train(model)
print("counted", int(model.norm.num_batches_tracked))
state = copy.deepcopy(model.state_dict())

again = Model()
again.load_state_dict(state)
print("went on", train(again, 1)[0] < losses[0], int(again.norm.num_batches_tracked))

frozen = Model()
frozen.load_state_dict(state)
frozen.requires_grad_(False)
train(frozen, 1)
print("frozen", torch.equal(frozen.head.weight, state["head.weight"]))

evaluation = poptorch.inferenceModel(model.eval(), options(1))
x = torch.randn(8, 6)
print("evaluated", torch.allclose(evaluation(x), model(x), atol=1e-5))
