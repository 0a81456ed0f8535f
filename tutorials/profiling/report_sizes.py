"""Record more and more calls of a training, and show how large its report becomes."""

import argparse
import time
from pathlib import Path

import torch
from network import count, load_digits, make_parser, train, wrap

import popsim_torch as poptorch

FILES = ("profile.pop", "trace.json", "report.html")


def measure(
    arguments: argparse.Namespace, digits: tuple[torch.Tensor, torch.Tensor], recorded: int
) -> tuple[poptorch.report.Report, float]:
    """Train with a report; return the report, and the seconds in which it was written."""
    directory = arguments.report / str(recorded)
    options = poptorch.Options().deviceIterations(arguments.updates)
    options.outputMode(poptorch.OutputMode.All)
    options.Training.gradientAccumulation(arguments.micro_batches)
    options._Popart.setEngineOptions(
        {
            "autoReport.all": "true",
            "autoReport.directory": str(directory),
            "autoReport.executionProfileProgramRunCount": str(recorded),
        }
    )
    samples = arguments.micro_batch_size * arguments.micro_batches * arguments.updates
    executor = wrap(options, is_pipelined=True)
    train(executor, digits, arguments.calls, samples)
    start = time.perf_counter()
    executor.destroy()
    seconds = time.perf_counter() - start
    return poptorch.report.open(directory / "training"), seconds


def main() -> None:
    parser = make_parser(__doc__)
    flag = parser.add_argument
    default = "(default: %(default)s)"
    flag("--recorded", type=count, nargs="+", default=[1, 2, 10, 100], help=f"calls {default}")
    flag("--calls", type=count, default=100, help=f"of each training {default}")
    flag("--micro-batches", type=count, default=4, help=f"per update {default}")
    flag("--updates", type=count, default=1, help=f"in a call {default}")
    flag("--report", type=Path, metavar="DIR", default=Path("sizes"), help=default)
    arguments = parser.parse_args()

    digits = load_digits(arguments)
    print("recorded" + "".join(f"{name:>13}" for name in FILES) + "  written in (measured)")
    for recorded in arguments.recorded:
        report, seconds = measure(arguments, digits, recorded)
        sizes = [(report.folder / name).stat().st_size for name in FILES]
        shown = "".join(f"{size / 1000:10,.0f} kB" for size in sizes)
        print(f"{len(report.runs):8}{shown}{1000 * seconds:20,.0f} ms")


if __name__ == "__main__":
    main()
