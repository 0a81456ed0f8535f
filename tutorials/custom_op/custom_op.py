"""Write an activation as a custom operator in C++ and in Python, and measure both.

Compiling ``mish.cpp`` needs only a compiler and one header. A decorator registers
the same operator in Python. Both have a gradient, so a model with them can be
trained. A formula of torch functions gives the expected results.
"""

import argparse
import ctypes
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import popsim_torch as poptorch

SOURCE = Path(__file__).with_name("mish.cpp")
Activation = Callable[[torch.Tensor], torch.Tensor]


def load_library(folder: str) -> None:
    """Compile ``mish.cpp`` and load it, which registers its operator."""
    library = Path(folder) / "libmish.so"
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-march=native"]
    command += ["-shared", "-fPIC", "-I", poptorch.custom_op_include()]
    subprocess.run([*command, str(SOURCE), "-o", str(library)], check=True)
    ctypes.cdll.LoadLibrary(str(library))


@poptorch.register_custom_op("MishInPython", domain="tutorial")
def mish_kernel(x: torch.Tensor) -> torch.Tensor:
    """Compute the operator. The device calls this in every micro-batch."""
    return x * torch.tanh(F.softplus(x))


@mish_kernel.shapes
def _(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        raise TypeError(f"Mish takes float32 or float16, got {x.dtype}")
    return torch.empty_like(x)


@mish_kernel.gradient
def _(x: torch.Tensor, y: torch.Tensor, arriving: torch.Tensor) -> torch.Tensor:
    share = torch.tanh(F.softplus(x))
    return arriving * (share + x * torch.sigmoid(x) * (1 - share * share))


@mish_kernel.cost
def _(x: torch.Tensor) -> int:
    return 40 * x.numel()


def custom(name: str) -> Activation:
    """Return the activation that an operator computes."""

    def activation(x: torch.Tensor) -> torch.Tensor:
        # Pass one example for each output. Only its shape and dtype are used.
        # Outside of a compiled model the results are zeros, as in PopTorch.
        (y,) = poptorch.custom_op([x], name, "tutorial", 1, example_outputs=[x])
        return y

    return activation


def composite(x: torch.Tensor) -> torch.Tensor:
    """Compute the same function with torch functions."""
    return x * torch.tanh(F.softplus(x))


class Network(nn.Module):
    """A layer, the activation, and a mean of squares as the loss."""

    def __init__(self, activation: Activation, width: int):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.randn(width))
        self.activation = activation

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.activation(x * self.scale)
        return y, poptorch.identity_loss(y.square(), reduction="mean")


def make_options() -> poptorch.Options:
    return poptorch.Options().showCompilationProgressBar(False)


def train(activation: Activation, x: torch.Tensor) -> tuple[poptorch.PoplarExecutor, Network]:
    network = Network(activation, x.shape[1])
    optimizer = poptorch.optim.SGD(network.parameters(), lr=0.1)
    return poptorch.trainingModel(network, make_options(), optimizer), network


def check(activation: Activation, x: torch.Tensor) -> None:
    """Compare two steps of training with eager PyTorch."""
    training, network = train(activation, x)
    eager = Network(composite, x.shape[1])
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2):
        y, loss = training(x)
        expected_y, expected_loss = eager(x)
        optimizer.zero_grad()
        expected_loss.backward()
        optimizer.step()
        torch.testing.assert_close(y, expected_y.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(loss, expected_loss.detach())
    training.copyWeightsToHost()
    torch.testing.assert_close(network.scale, eager.scale, rtol=1e-5, atol=1e-5)


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def eager_step(x: torch.Tensor) -> Callable[[], None]:
    network = Network(composite, x.shape[1])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        network(x)[1].backward()
        optimizer.step()

    return step


def show_times(x: torch.Tensor, activations: dict[str, Activation], repeats: int) -> None:
    print(f"{'milliseconds per call':26} {'inference':>10} {'training':>10}")
    for name, activation in activations.items():
        network = Network(activation, x.shape[1])
        inference = poptorch.inferenceModel(network, make_options())
        training, _ = train(activation, x)
        times = [milliseconds(lambda run=run: run(x), repeats) for run in (inference, training)]
        print(f"{name:26} {times[0]:10.2f} {times[1]:10.2f}")
    network = Network(composite, x.shape[1])
    with torch.no_grad():
        forward = milliseconds(lambda: network(x), repeats)
    print(f"{'eager PyTorch':26} {forward:10.2f} {milliseconds(eager_step(x), repeats):10.2f}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=30, help="calls; their median is printed")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    x = torch.randn(arguments.rows, arguments.columns, generator=torch.Generator().manual_seed(1))
    activations = {
        "custom operator, C++": custom("Mish"),
        "custom operator, Python": custom("MishInPython"),
        "functions of torch": composite,
    }
    with tempfile.TemporaryDirectory() as folder:
        load_library(folder)
        for name, activation in activations.items():
            check(activation, x[:16])
            print(f"{name}: values, gradients and updates are those of eager PyTorch")
        show_times(x, activations, arguments.repeats)


if __name__ == "__main__":
    main()
