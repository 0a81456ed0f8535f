"""Plot the time of a step against the number of steps in one call of the device."""

import time
from collections.abc import Callable
from pathlib import Path

import mnist_with_feeds
import mnist_without_feeds
import torch
from matplotlib.figure import Figure
from network import Batches, load_batches, loss_of, make_network, make_parser

COUNTS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
WITHOUT, EAGER = "without queues", "eager PyTorch"
ROUNDS = 5

Runs = Callable[[int], None]
"""A function that trains for the given number of steps."""


def with_feeds(batches: Batches, learning_rate: float, steps_per_execution: int) -> Runs:
    train, outfeed = mnist_with_feeds.make_training(batches, steps_per_execution, learning_rate)

    def run(steps: int) -> None:
        for _ in range(0, steps, steps_per_execution):
            train()
        outfeed.dequeue()

    return run


def without_feeds(batches: Batches, learning_rate: float) -> Runs:
    train, elements = mnist_without_feeds.make_training(learning_rate), iter(batches)

    def run(steps: int) -> None:
        torch.stack([train(*next(elements)) for _ in range(steps)])

    return run


def in_eager_pytorch(batches: Batches, learning_rate: float) -> Runs:
    network, elements = make_network(), iter(batches)
    optimizer = torch.optim.SGD(network.parameters(), lr=learning_rate)

    def run(steps: int) -> None:
        losses = []
        for _ in range(steps):
            images, labels = next(elements)
            loss = loss_of(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        torch.stack(losses)

    return run


def measure(runs: dict[int | str, Runs], steps: int) -> dict[int | str, float]:
    """Return the shortest time of a step of each run, in microseconds, without compilation."""
    for key, run in runs.items():
        run(key if isinstance(key, int) else 1)  # the first call compiles
    times = dict.fromkeys(runs, float("inf"))
    # Alternate between the runs, so that other load of the machine affects all of them.
    for _ in range(ROUNDS):
        for key, run in runs.items():
            num_steps = -(-steps // key) * key if isinstance(key, int) else steps
            start = time.perf_counter()
            run(num_steps)
            seconds = time.perf_counter() - start
            times[key] = min(times[key], 1e6 * seconds / num_steps)
    return times


def plot(times: dict[int | str, float], near: int, batch_size: int, path: Path) -> None:
    """Save the picture.

    Args:
        times: Time of a step (microseconds), for each number of steps per execution, and for
            the two runs without queues.
        near: The number of steps per execution to mark.
        batch_size: The batch size in the title.
        path: The path of the PNG file.
    """
    counts = [key for key in times if isinstance(key, int)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(counts, [times[key] for key in counts], "o-", label="with queues")
    axes.axhline(times[WITHOUT], color="tab:orange", linestyle="--", label=WITHOUT)
    axes.axhline(times[EAGER], color="tab:green", linestyle="--", label=EAGER)
    axes.axvline(near, color="tab:gray", linestyle=":", label=f"{near}: within 5 % of the best")
    axes.set(
        xscale="log",
        xticks=counts,
        xticklabels=counts,
        ylim=(0, None),
        title=f"Training 784-128-10 with batches of {batch_size}",
        xlabel="steps per execution",
        ylabel="time of a step, microseconds",
    )
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = make_parser(__doc__, steps=2000)
    parser.add_argument(
        "--output", type=Path, default=Path("times.png"), help="picture (default: %(default)s)"
    )
    arguments = parser.parse_args()
    batches, rate = load_batches(arguments), arguments.learning_rate
    counts = [number for number in COUNTS if number <= arguments.steps]
    runs: dict[int | str, Runs] = {n: with_feeds(batches, rate, n) for n in counts}
    runs[WITHOUT] = without_feeds(batches, rate)
    runs[EAGER] = in_eager_pytorch(batches, rate)
    times = measure(runs, arguments.steps)

    for key, value in times.items():
        name = f"{key:4} steps per execution" if isinstance(key, int) else key
        print(f"{name:<25} {value:7.1f} microseconds a step")
    best = min(times[number] for number in counts)
    near = next(number for number in counts if times[number] <= 1.05 * best)
    print(f"{near} steps per execution are within 5 % of the best.")
    print(f"Without queues / with queues: {times[WITHOUT] / best:.2f}")
    print(f"Eager PyTorch / with queues: {times[EAGER] / best:.2f}")
    plot(times, near, arguments.batch_size, arguments.output)
    print(f"Saved plot to {arguments.output}")


if __name__ == "__main__":
    main()
