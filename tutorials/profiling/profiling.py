"""Train a network on digits over two IPUs; a report says what that would cost."""

import argparse
from pathlib import Path

from network import count, load_digits, make_parser, train, wrap

import popsim_torch as poptorch


def make_options(arguments: argparse.Namespace) -> poptorch.Options:
    """Return options for a pipeline, with a report if one is wanted."""
    options = poptorch.Options().deviceIterations(arguments.updates)
    options.outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(arguments.micro_batches)
    if arguments.report is not None:
        options.enableProfiling(arguments.report)
    return options


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--micro-batches", type=count, default=4, help="per update (default: %(default)s)"
    )
    parser.add_argument(
        "--updates", type=count, default=1, help="weight updates in a call (default: %(default)s)"
    )
    parser.add_argument("--calls", type=count, default=10, help="(default: %(default)s)")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="where a report goes (default: no report)"
    )
    arguments = parser.parse_args()
    samples = arguments.micro_batch_size * arguments.micro_batches * arguments.updates
    executor = wrap(make_options(arguments), is_pipelined=True)
    losses = train(executor, load_digits(arguments), arguments.calls, samples)
    executor.destroy()  # the report is written here
    print(f"Mean loss: {losses[0]:.4f} in the first call, {losses[-1]:.4f} in the last one")


if __name__ == "__main__":
    main()
