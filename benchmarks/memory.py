"""How much memory does a training step need, compared with eager PyTorch?

Each number comes from a fresh process, which first trains a model of ten weights, so that all code
is loaded. The result is the most memory that the process uses after this moment, minus the memory
that it uses at this moment: data, weights, gradients, activations, and, for this package, the
memory that compiling needs and keeps. An executor has two copies of the weights, one for the host
and one for the device.

The table also shows the size of the device's memory plan, and how close this is to the minimum of
any plan, which is the largest sum of the tensors alive at the same time.
"""

from __future__ import annotations

from torch import nn

from benchmarks.common.cases import Case, find_case
from benchmarks.common.contenders import eager_training, make_training_model
from benchmarks.common.fresh import FreshProcess, current_bytes, peak_bytes, reset_peak
from benchmarks.common.report import Table, describe_machine, make_parser

NUM_STEPS = 3
MEBI = 1 << 20
TINY = Case("tiny", lambda: nn.Linear(1, 10), 2, (1,))


def _train_eagerly(case: Case) -> None:
    step = eager_training(case, case.make_batches(1), 1)
    for _ in range(NUM_STEPS):
        step()


def _train_on_device(case: Case) -> dict[str, int]:
    model = make_training_model(case)
    batches = case.make_batches(1)
    for _ in range(NUM_STEPS):
        model(*batches)
    plan = model.compiled.executable.plan
    return {
        "arena": plan.arena_bytes,
        "live": plan.peak_live_bytes,
        "persistent": plan.persistent_bytes,
    }


def eager_peak(name: str) -> int:
    """Train a case in eager PyTorch; return the increase of the process's memory, in bytes."""
    _train_eagerly(TINY)
    reset_peak()
    before = current_bytes()
    _train_eagerly(find_case(name))
    return peak_bytes() - before


def our_peak(name: str) -> dict[str, int]:
    """Train a case on the device; return the memory increase and the plan's sizes, in bytes."""
    _train_on_device(TINY)
    reset_peak()
    before = current_bytes()
    plan = _train_on_device(find_case(name))
    return plan | {"peak": peak_bytes() - before}


def main() -> None:
    """Print the table."""
    processes = FreshProcess("benchmarks.memory", {"eager": eager_peak, "ours": our_peak})
    if processes.serve():
        return
    arguments = make_parser(__doc__, rounds=1).parse_args()
    print(describe_machine())
    table = Table(
        f"Peak memory of {NUM_STEPS} training steps, MiB",
        ["case", "eager", "ours", "ours/eager", "arena", "persistent", "arena / live at a time"],
        "Targets: ours at most eager's; the arena at most 1.1 times the live tensors.",
    )
    for case in arguments.cases:
        eager = min(processes.call("eager", case.name) for _ in range(arguments.rounds))
        found = [processes.call("ours", case.name) for _ in range(arguments.rounds)]
        ours = min(figures["peak"] for figures in found)
        plan = found[0]
        table.row(
            case.name,
            eager / MEBI,
            ours / MEBI,
            ours / eager,
            plan["arena"] / MEBI,
            plan["persistent"] / MEBI,
            plan["arena"] / plan["live"],
        )


if __name__ == "__main__":
    main()
