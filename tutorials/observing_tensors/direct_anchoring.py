"""Find tensors by name, anchor them in four output modes, compare the results."""

import argparse

import torch
from torch import nn

import popsim_torch as poptorch

FEATURES, CLASSES = 10, 4


class Classifier(nn.Module):
    """One hidden layer and a loss."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, 8)
        self.fc2 = nn.Linear(8, CLASSES)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, inputs, labels):
        logits = self.fc2(torch.relu(self.fc1(inputs)))
        return logits, self.loss(logits, labels)


def make_options(arguments: argparse.Namespace) -> poptorch.Options:
    options = poptorch.Options()
    options.deviceIterations(arguments.device_iterations)
    options.Training.gradientAccumulation(arguments.gradient_accumulation)
    return options


def make_executor(model: nn.Module, options: poptorch.Options):
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, options=options, optimizer=optimizer)


def list_names(arguments: argparse.Namespace, inputs, labels) -> list[str]:
    """Return the names of all tensors of the compiled training graph."""
    executor = make_executor(Classifier(), make_options(arguments))
    executor.compile(inputs, labels)
    return executor.getTensorNames()


def anchor_bias(options: poptorch.Options, period: int) -> None:
    """Anchor one gradient four times, and one updated weight."""
    gradient = "Gradient___fc2.bias"
    options.anchorTensor("all", gradient, output_mode=poptorch.OutputMode.All)
    options.anchorTensor("sum", gradient, output_mode=poptorch.OutputMode.Sum)
    options.anchorTensor("final", gradient, output_mode=poptorch.OutputMode.Final)
    options.anchorTensor(
        "every_n",
        gradient,
        output_mode=poptorch.OutputMode.EveryN,
        output_return_period=period,
    )
    # An anchor without a mode uses the mode of the model outputs: Final here.
    options.anchorTensor("weight", "UpdatedVar___fc2.weight")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device-iterations", type=int, default=4)
    parser.add_argument("--gradient-accumulation", type=int, default=2)
    parser.add_argument("--period", type=int, default=2, help="of the EveryN anchor")
    parser.add_argument("--micro-batch-size", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    num_micro_batches = arguments.device_iterations * arguments.gradient_accumulation
    num_samples = num_micro_batches * arguments.micro_batch_size
    inputs = torch.rand(num_samples, FEATURES)
    labels = torch.randint(CLASSES, (num_samples,))

    # Step 1: list the names of all tensors. They exist when a model is compiled.
    names = list_names(arguments, inputs, labels)
    print(f"{len(names)} tensors, those of layer fc2:")
    for name in sorted(name for name in names if "fc2" in name):
        print(f"  {name}")

    # Step 2: register the anchors in new options, then wrap the model.
    options = make_options(arguments)
    anchor_bias(options, arguments.period)
    model = Classifier()
    executor = make_executor(model, options)
    executor(inputs, labels)

    # Step 3: read the tensors of the last call.
    print(f"One call ran {num_micro_batches} micro-batches:")
    for short_name in ("all", "sum", "final", "every_n", "weight"):
        shape = tuple(executor.getAnchoredTensor(short_name).shape)
        print(f"  {short_name:8} shape {shape}")

    # A gradient belongs to one micro-batch, so Sum adds what All lists.
    per_micro_batch = executor.getAnchoredTensor("all").view(num_micro_batches, CLASSES)
    torch.testing.assert_close(per_micro_batch.sum(dim=0), executor.getAnchoredTensor("sum"))
    torch.testing.assert_close(per_micro_batch[-1], executor.getAnchoredTensor("final"))
    executor.copyWeightsToHost()
    torch.testing.assert_close(executor.getAnchoredTensor("weight"), model.fc2.weight.detach())
    print("Sum, Final and the updated weight agree with the other copies.")


if __name__ == "__main__":
    main()
