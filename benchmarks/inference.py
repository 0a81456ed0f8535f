"""How long does inference take, compared with eager PyTorch and torch.compile?

All contenders run without autograd (``torch.inference_mode``). The cases use one device iteration
per call and several: the time is per batch. Before the timing, the results of all contenders are
compared. torch.compile has no device iterations, and compiles for a long time: only the first row
of a case has it, and with ``--no-compile`` none. Many device iterations are left out if a call
would take longer than three seconds.
"""

from __future__ import annotations

import torch

from benchmarks.common.cases import Case
from benchmarks.common.clock import check_agreement, medians
from benchmarks.common.contenders import (
    LONGEST_CALL,
    TOLERANCE,
    Step,
    eager_inference,
    our_inference,
)
from benchmarks.common.report import Table, describe_machine, make_parser, rival_columns, rival_row

ITERATIONS = (1, 16)


def measure(
    case: Case, device_iterations: int, rounds: int, *, with_compile: bool
) -> dict[str, float | None]:
    """Return the medians of the contenders, in seconds per batch."""
    batches = case.make_batches(device_iterations)
    contenders: dict[str, Step] = {"eager": eager_inference(case, batches, device_iterations)}
    if with_compile:
        contenders["compile"] = eager_inference(case, batches, device_iterations, compiled=True)
    contenders["ours"] = our_inference(case, batches, device_iterations)
    check_agreement(contenders, num_calls=2, tolerance=TOLERANCE[case.dtype])
    times = medians(contenders, rounds)
    return {name: time / device_iterations for name, time in times.items()}


def main() -> None:
    """Print the table: a row per case and number of device iterations."""
    parser = make_parser(__doc__)
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--iterations", type=int, nargs="*", default=ITERATIONS)
    arguments = parser.parse_args()
    print(describe_machine())
    with_compile = not arguments.no_compile
    table = Table("Inference", rival_columns(with_compile=with_compile))
    for case in arguments.cases:
        # Compilations of earlier cases would count towards torch.compile's limits.
        torch.compiler.reset()
        seconds = 0.0
        for number, device_iterations in enumerate(arguments.iterations):
            if number > 0 and device_iterations * seconds > LONGEST_CALL:
                continue
            times = measure(
                *(case, device_iterations, arguments.rounds),
                with_compile=with_compile and number == 0,
            )
            if with_compile:
                times.setdefault("compile", None)
            rival_row(table, case.name, device_iterations, times)
            seconds = times["eager"] or 0.0


if __name__ == "__main__":
    main()
