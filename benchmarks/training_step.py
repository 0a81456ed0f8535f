"""How long does a training step of the tutorial's network take, against eager PyTorch?

Both run in turn, round by round, on the same data, after their losses were compared. Reported: the
medians over the rounds, their ratio, and what tracing and compiling took.
"""

from __future__ import annotations

import argparse
import copy
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import popsim_torch as poptorch

BATCH_SIZES = (32, 1000)
LEARNING_RATE = 0.01


class Network(nn.Module):
    """784-320-100-10 with its loss, as in ``tutorials/observing_tensors``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(784, 320)
        self.fc2 = nn.Linear(320, 100)
        self.fc3 = nn.Linear(100, 10)
        self.loss = nn.NLLLoss()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log probabilities, shape ``(batch, 10)``, and the loss."""
        x = torch.relu(self.fc1(torch.flatten(x, start_dim=1)))
        x = torch.relu(self.fc2(x))
        x = torch.log_softmax(self.fc3(x), dim=1)
        return x, self.loss(x, labels)


def processor_name() -> str:
    """Return the processor's name as the system knows it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.split(":", 1)[1].strip() for line in file if "model name" in line]
        return names[0]
    except (OSError, IndexError):
        return platform.processor() or "unknown processor"


def seconds_per_call(step: Callable[[], object], calls: int) -> float:
    """Return the mean time of ``calls`` calls, in seconds."""
    start = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - start) / calls


def compare(batch_size: int, rounds: int, device_iterations: int) -> None:
    """Measure one batch size and print one line."""
    torch.manual_seed(0)
    eager = Network()
    network = copy.deepcopy(eager)
    options = poptorch.Options().showCompilationProgressBar(False)
    options.deviceIterations(device_iterations)
    model = poptorch.trainingModel(
        network, options, poptorch.optim.SGD(network.parameters(), lr=LEARNING_RATE)
    )
    images = torch.randn(batch_size * device_iterations, 1, 28, 28)
    labels = torch.randint(0, 10, (batch_size * device_iterations,))
    start = time.perf_counter()
    model.compile(images, labels)
    compile_seconds = time.perf_counter() - start
    optimizer = torch.optim.SGD(eager.parameters(), lr=LEARNING_RATE)
    batches = list(zip(images.split(batch_size), labels.split(batch_size), strict=True))

    def ours() -> torch.Tensor:
        _, loss = model(images, labels)
        return loss

    def eagerly() -> torch.Tensor:
        for x, y in batches:
            optimizer.zero_grad()
            _, loss = eager(x, y)
            loss.backward()
            optimizer.step()
        return loss.detach()

    for _ in range(3):
        torch.testing.assert_close(ours(), eagerly(), rtol=1e-4, atol=1e-5)
    calls = max(1, int(0.1 / seconds_per_call(eagerly, 3)))
    times: dict[str, list[float]] = {"ours": [], "eager": []}
    for _ in range(rounds):
        times["ours"].append(seconds_per_call(ours, calls) / device_iterations)
        times["eager"].append(seconds_per_call(eagerly, calls) / device_iterations)
    ours_ms = 1e3 * statistics.median(times["ours"])
    eager_ms = 1e3 * statistics.median(times["eager"])
    print(
        f"batch {batch_size:5d}, {device_iterations:3d} device iterations: "
        f"ours {ours_ms:8.3f} ms, eager {eager_ms:8.3f} ms, eager/ours {eager_ms / ours_ms:5.2f}; "
        f"compiled in {compile_seconds:.2f} s, {len(model.getTensorNames())} tensors"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(
        f"{processor_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"popsim_torch {poptorch.__version__}; medians of {arguments.rounds} rounds"
    )
    for device_iterations in (1, 16):
        for batch_size in BATCH_SIZES:
            compare(batch_size, arguments.rounds, device_iterations)


if __name__ == "__main__":
    main()
