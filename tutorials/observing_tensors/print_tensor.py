"""Print tensors from inside a model while it runs, with their gradients.

A plain ``print`` in ``forward`` runs once, when the model is traced, and has no
values to show. ``ipu_print_tensor`` becomes part of the program instead.
"""

import argparse

import torch
from torch import nn

import popsim_torch as poptorch


class Regression(nn.Module):
    """Two linear layers that print the tensors between them."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(4, 3)
        self.output = nn.Linear(3, 1)
        self.loss = nn.MSELoss()

    def forward(self, inputs, targets):
        # Each print returns its argument. Use the returned tensor: if the result
        # is not used, the print is removed from the program.
        # Without a title the output starts with the name of the tensor.
        inputs = poptorch.ipu_print_tensor(inputs)
        hidden = self.hidden(inputs)
        hidden = poptorch.ipu_print_tensor(hidden, title="hidden")
        prediction = self.output(torch.relu(hidden))
        # Values only, eight digits, always with an exponent, other brackets.
        prediction = poptorch.ipu_print_tensor(
            prediction,
            title="prediction",
            print_gradient=False,
            digits=8,
            float_format="scientific",
            separator=";",
            open_bracket="[",
            close_bracket="]",
        )
        loss = self.loss(prediction, targets)
        # Large tensors are shortened. Here a tensor is large if it has more than 6
        # values, and one value at each end of a dimension is printed.
        squares = poptorch.ipu_print_tensor(
            inputs.square(), title="squares", summarise_threshold=6, edge_items=1
        )
        return prediction, loss, squares


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1, help="training steps to run and print")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    inputs = torch.rand(2, 4)
    targets = inputs.sum(dim=1, keepdim=True)

    model = Regression()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, optimizer=optimizer)
    for step in range(1, arguments.steps + 1):
        # The prints of the model go to stderr, this line to stdout.
        _, loss, _ = executor(inputs, targets)
        print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
