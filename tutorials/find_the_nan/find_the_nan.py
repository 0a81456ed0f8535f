"""Train with a fault that makes the loss NaN, find it with Options.watch, and train without it."""

import argparse
import math
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

import torch
from faults import CASES, Setup
from network import Classifier

import popsim_torch as poptorch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common.arguments import count
from common.batches import Batches, load_mnist
from common.data import add_data_arguments

Digits = tuple[torch.Tensor, torch.Tensor]


def make_executor(setup: Setup, options: poptorch.Options):
    model = Classifier(setup)
    optimizer = torch.optim.SGD(model.parameters(), lr=setup.learning_rate)
    return poptorch.trainingModel(model, options, optimizer)


def train(executor, setup: Setup, digits: Digits, arguments: argparse.Namespace) -> list[float]:
    """Return the loss of each step."""
    images, labels = digits
    batches = Batches(setup.spoil(images), labels, arguments.batch_size)
    return [executor(*batch).item() for batch in islice(iter(batches), arguments.steps)]


def train_unwatched(
    setup: Setup, digits: Digits, arguments: argparse.Namespace
) -> tuple[list[float], list[poptorch.Record]]:
    """Return the losses, and the counts of bad numbers in all tensors."""
    options = poptorch.Options().observe("*", poptorch.Counts(), every=1)
    executor = make_executor(setup, options)
    losses = train(executor, setup, digits, arguments)
    records = executor.observations()
    executor.destroy()
    return losses, records


def train_watched(
    setup: Setup, digits: Digits, arguments: argparse.Namespace, capsule: Path
) -> poptorch.Verdict | None:
    """Return where the first bad number came from; None if there was none."""
    executor = make_executor(setup, poptorch.Options().watch(capsule=capsule))
    try:
        train(executor, setup, digits, arguments)
    except poptorch.BadNumberError as error:
        return error.verdict
    finally:
        executor.destroy()
    return None


def replay_elsewhere(capsule: Path) -> str:
    """Return what `popsim replay` prints, which repeats the step in a process of its own."""
    command = [sys.executable, "-m", "popsim_torch", "replay", str(capsule)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def describe(losses: list[float]) -> str:
    bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
    if bad:
        return f"the loss is {losses[bad[0]]} from step {bad[0]} on"
    return f"the loss goes from {losses[0]:.3f} to {losses[-1]:.3f}"


def find(fault: str, digits: Digits, arguments: argparse.Namespace) -> None:
    """Show one fault: without and with the watch, repeated elsewhere, and mended."""
    broken, mended = CASES[fault]
    losses, records = train_unwatched(broken, digits, arguments)
    print(f"{fault}\n  without the watch: {describe(losses)}")
    if arguments.output is not None:
        poptorch.nan_map(records).savefig(arguments.output, dpi=100)
    with tempfile.TemporaryDirectory() as folder:
        capsule = arguments.capsule or Path(folder) / "bad.capsule"
        verdict = train_watched(broken, digits, arguments, capsule)
        if verdict is None:
            print("  with the watch:    no bad number; use more steps\n")
            return
        print("  with the watch:")
        print("\n".join(f"    {line}" for line in str(verdict).splitlines()))
        is_same = str(verdict) in replay_elsewhere(capsule)
        print(f"  replayed:          {'the same verdict' if is_same else 'ANOTHER VERDICT'}")
    losses, _ = train_unwatched(mended, digits, arguments)
    print(f"  mended:            {describe(losses)}\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=list(CASES), help="default: one after another")
    parser.add_argument("--steps", type=count, default=40)
    parser.add_argument("--batch-size", type=count, default=100)
    parser.add_argument("--capsule", type=Path, help="keep what repeats the bad step in this file")
    parser.add_argument("--output", type=Path, help="draw where the bad numbers are, of --fault")
    add_data_arguments(parser)
    arguments = parser.parse_args()
    if arguments.fault is None and (arguments.output or arguments.capsule):
        parser.error("--output and --capsule are for one fault: pass --fault, too")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    images, labels = load_mnist(arguments)
    digits = images.flatten(start_dim=1)[:4000], labels[:4000]
    for fault in [arguments.fault] if arguments.fault else CASES:
        find(fault, digits, arguments)


if __name__ == "__main__":
    main()
