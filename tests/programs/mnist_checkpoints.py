"""Digits, in the style of PopTorch's guide: training, a scheduler, checkpoints, validation."""

import argparse
import pathlib

import poptorch
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, in_channels, num_filters, kernel_size, pool_size):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, num_filters, kernel_size=kernel_size)
        self.pool = nn.MaxPool2d(kernel_size=pool_size)
        self.relu = nn.ReLU()

    def forward(self, x):
        return self.relu(self.pool(self.conv(x)))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = Block(1, 8, 3, 2)
        self.layer2 = Block(8, 16, 3, 2)
        self.layer3 = nn.Linear(400, 32)
        self.dropout = nn.Dropout(0.1)
        self.layer4 = nn.Linear(32, 10)

    def forward(self, x):
        x = self.layer2(self.layer1(x)).flatten(1)
        return self.layer4(self.dropout(torch.relu(self.layer3(x))))


class TrainingModelWithLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.loss = nn.CrossEntropyLoss()

    def forward(self, args, labels=None):
        output = self.model(args)
        if labels is None:
            return output
        return output, self.loss(output, labels)


def drawn_digits(count):
    """Ten shapes with noise: learnable without any file."""
    generator = torch.Generator().manual_seed(5)
    shapes = (torch.rand(10, 1, 28, 28, generator=generator) > 0.7).float()
    labels = torch.arange(count) % 10
    images = shapes[labels] + 0.3 * torch.randn(count, 1, 28, 28, generator=generator)
    return torch.utils.data.TensorDataset(images, labels)


def accuracy(predictions, labels):
    _, best = torch.max(predictions, 1)
    return (best == labels).float().mean().item() * 100.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    args = parser.parse_args()

    training_options = poptorch.Options()
    training_options.deviceIterations(4).randomSeed(1)
    training_options.Training.gradientAccumulation(2)
    training_options.showCompilationProgressBar(False)
    training_data = poptorch.DataLoader(
        training_options, drawn_digits(512), batch_size=8, shuffle=True, drop_last=True
    )
    test_options = poptorch.Options().deviceIterations(8).showCompilationProgressBar(False)
    test_data = poptorch.DataLoader(test_options, drawn_digits(128), batch_size=8)

    model = Network()
    model_with_loss = TrainingModelWithLoss(model)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
    training_model = poptorch.trainingModel(model_with_loss, training_options, optimizer=optimizer)

    for epoch in range(args.epochs):
        losses = []
        for images, labels in training_data:
            _, loss = training_model(images, labels)
            losses.append(loss.mean().item())
        scheduler.step()
        training_model.setOptimizer(optimizer)
        print(f"epoch {epoch} loss {sum(losses) / len(losses):.4f}")
        torch.save(
            {
                "epoch": epoch,
                "model_state_dict": model.state_dict(),
                "optimizer_state_dict": optimizer.state_dict(),
                "loss": losses[-1],
                "random_seed": training_model.rng_state,
            },
            args.checkpoint,
        )
    training_model.destroy()

    checkpoint = torch.load(args.checkpoint, weights_only=False)
    restored = Network()
    restored.load_state_dict(checkpoint["model_state_dict"])
    restored.eval()
    inference_model = poptorch.inferenceModel(restored, test_options)
    predictions, targets = [], []
    for images, labels in test_data:
        predictions.append(inference_model(images))
        targets.append(labels)
    inference_model.detachFromDevice()
    print(f"accuracy {accuracy(torch.cat(predictions), torch.cat(targets)):.1f}")

    # Training goes on where the checkpoint was written.
    again = Network()
    again.load_state_dict(checkpoint["model_state_dict"])
    optimizer = poptorch.optim.SGD(again.parameters(), lr=0.2, momentum=0.5)
    optimizer.load_state_dict(checkpoint["optimizer_state_dict"])
    training_model = poptorch.trainingModel(
        TrainingModelWithLoss(again), training_options, optimizer
    )
    images, labels = next(iter(training_data))
    training_model.compile(images, labels)
    training_model.rng_state = checkpoint["random_seed"]
    _, loss = training_model(images, labels)
    print(f"resumed loss {loss.mean().item():.4f}")


if __name__ == "__main__":
    main()
