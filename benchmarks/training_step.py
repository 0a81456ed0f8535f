"""How long is a training step, compared with eager PyTorch and torch.compile?

The cases use one device iteration per call and several: the time is per step. Before the timing,
the losses of all contenders are compared. torch.compile has no device iterations, and compiles for
a long time: only the first row of a case has it, and with ``--no-compile`` none. Many device
iterations are left out if a call would take longer than three seconds. ``--precision`` sets the
precision of float32 products: ``highest``, ``high`` and ``medium`` as
``torch.set_float32_matmul_precision`` does, ``bf16`` like ``medium``, but for convolutions and
recurrent layers, too.
"""

from __future__ import annotations

import torch

from benchmarks.common.cases import Case
from benchmarks.common.clock import check_agreement, medians
from benchmarks.common.contenders import (
    LONGEST_CALL,
    TOLERANCE,
    Step,
    eager_training,
    our_training,
)
from benchmarks.common.report import Table, describe_machine, make_parser, rival_columns, rival_row

ITERATIONS = (1, 16, 64)
PRECISIONS = ("highest", "high", "medium", "bf16")


def set_precision(precision: str) -> None:
    """Set the precision of float32 products, for eager PyTorch and for models compiled from now."""
    whole = precision == "bf16"
    torch.set_float32_matmul_precision("medium" if whole else precision)
    torch.backends.fp32_precision = "bf16" if whole else "none"


def measure(
    case: Case, device_iterations: int, rounds: int, precision: str, *, with_compile: bool
) -> dict[str, float | None]:
    """Return the medians of the contenders, in seconds per step."""
    set_precision(precision)
    batches = case.make_batches(device_iterations)
    contenders: dict[str, Step] = {"eager": eager_training(case, batches, device_iterations)}
    if with_compile:
        contenders["compile"] = eager_training(case, batches, device_iterations, compiled=True)
    contenders["ours"] = our_training(case, batches, device_iterations)
    # Rounding differences grow with every step.
    slack = 1 if device_iterations == 1 else 5
    exact = precision in ("highest", "high")
    tolerance = TOLERANCE[case.dtype] if exact else max(TOLERANCE.values())
    check_agreement(contenders, num_calls=1, tolerance=slack * tolerance)
    times = medians(contenders, rounds)
    return {name: time / device_iterations for name, time in times.items()}


def main() -> None:
    """Print the table: a row per case and number of device iterations."""
    parser = make_parser(__doc__)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--iterations", type=int, nargs="*", default=ITERATIONS)
    parser.add_argument("--precision", nargs="*", choices=PRECISIONS, default=("highest",))
    arguments = parser.parse_args()
    print(describe_machine())
    with_compile = not arguments.no_compile
    with_precision = tuple(arguments.precision) != ("highest",)
    columns = rival_columns(with_compile=with_compile)
    table = Table("Training step", [*columns, "precision"] if with_precision else columns)
    for case in arguments.cases:
        # Compilations of earlier cases would count towards torch.compile's limits.
        torch.compiler.reset()
        seconds = 0.0
        for number, device_iterations in enumerate(arguments.iterations):
            if number > 0 and device_iterations * seconds > LONGEST_CALL:
                continue
            for precision in arguments.precision:
                times = measure(
                    *(case, device_iterations, arguments.rounds, precision),
                    with_compile=with_compile and number == 0,
                )
                if with_compile:
                    times.setdefault("compile", None)
                shown = (precision,) if with_precision else ()
                rival_row(table, case.name, device_iterations, times, *shown)
            seconds = times["eager"] or 0.0


if __name__ == "__main__":
    main()
