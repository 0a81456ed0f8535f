"""Train with one step in a call, and with many steps in a call, and compare the two reports."""

import argparse
from pathlib import Path

import torch
from network import count, load_digits, make_parser, train, wrap

import popsim_torch as poptorch


def train_with_report(
    arguments: argparse.Namespace,
    digits: tuple[torch.Tensor, torch.Tensor],
    steps_in_a_call: int,
    directory: Path,
) -> tuple[list[torch.Tensor], poptorch.report.Report]:
    """Return the weights after the training, and the report."""
    options = poptorch.Options().deviceIterations(steps_in_a_call)
    options.outputMode(poptorch.OutputMode.All).enableProfiling(directory)
    executor = wrap(options)
    calls = arguments.steps // steps_in_a_call
    train(executor, digits, calls, steps_in_a_call * arguments.micro_batch_size)
    executor.destroy()  # the report is written here
    return list(executor.model.state_dict().values()), poptorch.report.open(directory / "training")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--steps", type=count, default=100, help="of each training (default: %(default)s)"
    )
    parser.add_argument("--steps-in-a-call", type=count, default=10, help="(default: %(default)s)")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", default=Path("steps"), help="(default: %(default)s)"
    )
    arguments = parser.parse_args()
    steps, many = arguments.steps, arguments.steps_in_a_call
    if steps % many:
        parser.error(
            f"--steps ({steps}) must be a multiple of --steps-in-a-call ({many}): "
            f"use {many * (steps // many + 1)}."
        )

    digits = load_digits(arguments)
    weights, one_step = train_with_report(arguments, digits, 1, arguments.report / "one")
    others, many_steps = train_with_report(arguments, digits, many, arguments.report / "many")
    comparison = one_step.compare(many_steps)
    print(comparison)
    print("\nThe same weights, to the last bit:", all(map(torch.equal, weights, others)))
    print("The page:", comparison.write_page(arguments.report / "comparison.html"))


if __name__ == "__main__":
    main()
