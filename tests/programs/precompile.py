"""Compile on one machine, run on another, in the style of PopTorch's guide."""

import sys

import poptorch
import torch


class ExampleModelWithLoss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.fc = torch.nn.Linear(5, 5)
        self.loss = torch.nn.MSELoss()

    def forward(self, x, target=None):
        fc = self.fc(x)
        if self.training:
            return fc, self.loss(fc, target)
        return fc


def make_options():
    return poptorch.Options().showCompilationProgressBar(False)


def train(executor):
    torch.manual_seed(8)
    x, target = torch.randn(4, 5), torch.randn(4, 5)
    return " ".join(f"{float(executor(x, target)[1]):.6f}" for _ in range(5))


def export(folder):
    options = make_options().useOfflineIpuTarget(poptorch.ipuHardwareVersion())
    model = ExampleModelWithLoss()
    training = poptorch.trainingModel(
        model, options, poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    training.compileAndExport(f"{folder}/training.poptorch", torch.randn(4, 5), torch.randn(4, 5))
    print("attached", training.isAttachedToDevice())
    inference = poptorch.inferenceModel(ExampleModelWithLoss().eval(), make_options())
    inference.compileAndExport(f"{folder}/inference.poptorch", torch.randn(4, 5))


def direct():
    model = ExampleModelWithLoss()
    training = poptorch.trainingModel(
        model, make_options(), poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    print("direct", train(training))


def run(folder):
    training = poptorch.load(f"{folder}/training.poptorch")
    print("loaded", train(training))
    model = ExampleModelWithLoss()
    executor = poptorch.trainingModel(
        model, make_options(), poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    )
    executor.loadExecutable(f"{folder}/training.poptorch")
    print("executable", train(executor))
    eager = ExampleModelWithLoss().eval()
    x = torch.randn(4, 5)
    inference = poptorch.load(f"{folder}/inference.poptorch")
    torch.testing.assert_close(inference(x), eager(x))
    print("inference ok")


if __name__ == "__main__":
    if sys.argv[1] == "export":
        export(sys.argv[2])
    else:
        direct()
        run(sys.argv[2])
