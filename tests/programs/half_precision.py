"""Half precision, in the style of the guide: loss scaling, stochastic rounding, exceptions."""

import poptorch
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.conv = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.fc = torch.nn.Linear(8 * 36, 4)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, labels):
        x = torch.relu(self.norm(self.conv(x))).flatten(1)
        x = self.fc(x)
        return x, self.loss(x.float(), labels)


def train(options, optimizer_options, steps=30):
    options.showCompilationProgressBar(False).randomSeed(7)
    model = Model().half()
    model.norm.float()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.05, **optimizer_options)
    training = poptorch.trainingModel(model, options, optimizer)
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(16, 3, 8, 8, generator=generator).half()
    labels = torch.randint(4, (16,), generator=generator)
    losses = [float(training(x, labels)[1]) for _ in range(steps)]
    assert model.fc.weight.dtype == torch.half
    return losses


scaled = {"loss_scaling": 1024.0, "velocity_scaling": 128.0, "use_combined_accum": True}
plain = train(poptorch.Options(), {"loss_scaling": 1024.0})
print(f"plain {plain[0]:.3f} {plain[-1]:.3f}")

options = poptorch.Options()
options.Precision.enableStochasticRounding(True)
options.Precision.setPartialsType(torch.half)
first = train(options, {"momentum": 0.9, **scaled})
options = poptorch.Options()
options.Precision.enableStochasticRounding(True)
options.Precision.setPartialsType(torch.half)
assert first == train(options, {"momentum": 0.9, **scaled}), "one seed, one result"
print(f"stochastic {first[0]:.3f} {first[-1]:.3f}")

options = poptorch.Options()
options.Training.gradientAccumulation(2).setAutomaticLossScaling(True)
automatic = train(options, {"accum_type": torch.float16})
print(f"automatic {automatic[0]:.3f} {automatic[-1]:.3f}")

options = poptorch.Options()
options.Precision.enableFloatingPointExceptions(True)
try:
    train(options, {"loss_scaling": 1e30})
except poptorch.Error as error:
    print("stopped:", type(error).__name__)
