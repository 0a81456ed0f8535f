"""How close do the ops of a training step come to the machine's limits?

Every op is timed on the device, and its floating-point operations and bytes are counted from its
shapes. The limits are measured in the same run: the fastest of a few large float32 matrix products
(torch's and ours), and copies inside the cache and through memory. Bytes are those that an op must
read and write; if they stay in the cache, more than 100 % of the memory's rate is possible.

``--ops 20`` also lists the slowest ops of each case. ``--peak 115`` asks another question: how much
faster than eager PyTorch could a step be, if all products, convolutions, attention and recurrent
layers ran at 115 GFLOP/s, and all other ops as they do? Give it the rate of a loop of nothing but
multiply-adds.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import popsim_torch as poptorch
from benchmarks.common.cases import Case
from benchmarks.common.clock import fastest, medians
from benchmarks.common.contenders import eager_training, make_options, make_training_model
from benchmarks.common.op_times import OpRecord, family_of, profile
from benchmarks.common.report import Table, describe_machine, make_parser

DENSE = ("attention", "convolution", "matmul", "recurrent")
"""Families of ops that mostly multiply and add."""
GEMM_SIZES = (1024, 2048)
CACHE_BYTES = 1 << 19
MEMORY_BYTES = 1 << 28


@dataclass(frozen=True)
class Peaks:
    """The limits of the machine.

    Attributes:
        flops: Float32 operations per second of the fastest matrix product.
        cache_bytes: Bytes read and written per second, inside the cache.
        memory_bytes: The same, through memory.
    """

    flops: float
    cache_bytes: float
    memory_bytes: float


class Product(nn.Module):
    """One matrix product."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight``."""
        return x @ self.weight


def gemm_rate(size: int, repeats: int) -> float:
    """Return the operations per second of the faster of torch's product and ours."""
    module = Product(size)
    x = torch.randn(size, size)
    model = poptorch.inferenceModel(module, make_options())
    records = profile(model, [x], repeats).records
    ours = sum(record.seconds for record in records if record.op.kind == "matmul")
    with torch.inference_mode():
        theirs = fastest(lambda: module(x), repeats)
    return 2.0 * size**3 / min(ours, theirs)


def copy_rate(num_bytes: int, repeats: int) -> float:
    """Return the bytes per second, read plus written, of a copy of ``num_bytes``."""
    source = torch.zeros(num_bytes // 4)
    target = torch.empty_like(source)
    return 2.0 * num_bytes / fastest(lambda: target.copy_(source), repeats)


def measure_peaks(repeats: int) -> Peaks:
    """Return the machine's limits."""
    return Peaks(
        max(gemm_rate(size, repeats) for size in GEMM_SIZES),
        copy_rate(CACHE_BYTES, 20 * repeats),
        copy_rate(MEMORY_BYTES, repeats),
    )


def _row(table: Table, name: str, records: list[OpRecord], total: float, peaks: Peaks) -> None:
    seconds = sum(record.seconds for record in records)
    flops = sum(record.flops for record in records) / seconds
    num_bytes = sum(record.bytes for record in records) / seconds
    table.row(
        name,
        str(len(records)),
        1e3 * seconds,
        100 * seconds / total,
        flops / 1e9 if flops else "",
        100 * flops / peaks.flops if flops else "",
        num_bytes / 1e9,
        100 * num_bytes / peaks.memory_bytes,
    )


COLUMNS = ["ms", "% of call", "GFLOP/s", "% of peak", "GB/s", "% of memory's"]


def report(case: Case, peaks: Peaks, rounds: int, num_slowest: int) -> None:
    """Print the table of one case, and that of its slowest ops if asked for."""
    batches = case.make_batches(1)
    model = make_training_model(case)
    found = profile(model, batches, rounds)
    total, records = found.seconds, found.records
    families: dict[str, list[OpRecord]] = {}
    for record in records:
        families.setdefault(family_of(record.op), []).append(record)
    table = Table(f"{case.name}, training step", ["family", "ops", *COLUMNS])
    by_time = sorted(families.items(), key=lambda item: -sum(r.seconds for r in item[1]))
    for family, members in by_time:
        _row(table, family, members, total, peaks)
    rest = total - sum(record.seconds for record in records)
    table.row("outside of ops", "", 1e3 * rest, 100 * rest / total, "", "", "", "")
    table.row("**call**", str(len(records)), 1e3 * total, 100.0, "", "", "", "")
    if num_slowest:
        table = Table(f"{case.name}, slowest ops", ["op", "times", *COLUMNS])
        for record in sorted(records, key=lambda record: -record.seconds)[:num_slowest]:
            _row(table, record.text, [record], total, peaks)


def is_dense(record: OpRecord) -> bool:
    """Return whether an op mostly multiplies and adds, which it could do at the peak."""
    return family_of(record.op) in DENSE or "product" in record.op.kind


def bound(table: Table, case: Case, flops: float, rounds: int) -> None:
    """Add the row of one case: our step as it is and at a rate of its dense ops, and eager's."""
    batches = case.make_batches(1)
    model = make_training_model(case)
    found = profile(model, batches, rounds)
    saved = sum(
        max(record.seconds - record.flops / flops, 0.0)
        for record in filter(is_dense, found.records)
    )
    eager = eager_training(case, batches, 1)
    eager()
    times = medians({"eager": eager, "ours": lambda: model(*batches)}, rounds)
    # The machine may have been faster or slower during the profile: its shares hold.
    at_peak = times["ours"] * (1 - saved / found.seconds)
    table.row(
        case.name,
        *(1e3 * seconds for seconds in (times["eager"], times["ours"], at_peak)),
        times["eager"] / times["ours"],
        times["eager"] / at_peak,
    )


def main() -> None:
    """Print the limits, then a table per case; or one table of what a peak allows."""
    parser = make_parser(__doc__)
    parser.add_argument("--ops", type=int, default=0, help="list so many of the slowest ops")
    parser.add_argument("--peak", type=float, help="GFLOP/s of all threads, for dense ops")
    arguments = parser.parse_args()
    print(describe_machine())
    if arguments.peak:
        columns = ["eager, ms", "ours, ms", "ours at the peak, ms", "eager/ours", "at the peak"]
        table = Table(f"Dense ops at {arguments.peak:g} GFLOP/s", ["case", *columns])
        for case in arguments.cases:
            bound(table, case, 1e9 * arguments.peak, arguments.rounds)
        return
    peaks = measure_peaks(max(2, arguments.rounds))
    print(
        f"\nPeaks: {peaks.flops / 1e9:.0f} GFLOP/s float32; copies "
        f"{peaks.cache_bytes / 1e9:.0f} GB/s in the cache, "
        f"{peaks.memory_bytes / 1e9:.1f} GB/s through memory (read plus written)"
    )
    for case in arguments.cases:
        report(case, peaks, arguments.rounds, arguments.ops)


if __name__ == "__main__":
    main()
