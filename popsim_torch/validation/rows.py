"""The validation table: published figures beside those of the machine model.

The rows are those of the documents that the model was written from; their numbers are in
``docs/how_true.md``. Only constants that ``machine_constants`` marks as such may be moved to fit.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from popsim_torch.machine import Estimate, machine_constant, machine_device, matmul_plan
from popsim_torch.validation.bert import BASE, LARGE, estimate_bert, estimate_on_one_ipu
from popsim_torch.validation.images import (
    estimate_loading,
    estimate_resnet,
    estimate_resnet_inference,
)

__all__ = ["Row", "validation_rows", "whole_models"]

_TERA = 1e12


@dataclass(frozen=True)
class Row:
    """A published figure and ours.

    Attributes:
        number: The number of the row, with a letter if it has several figures.
        what: The configuration.
        unit: The unit of the figures.
        published: The published figure.
        ours: Computes our figure.
        tolerance: The largest accepted error, a share.
        soft: Whether a larger error is accepted.
        source: Where the figure was published.
        prototype: The figure of a prototype of the same formulas; None if it is unknown.
    """

    number: str
    what: str
    unit: str
    published: float
    ours: Callable[[], float]
    tolerance: float
    source: str
    prototype: float | None = None
    soft: bool = False

    def error(self) -> float:
        """Return the relative error of our figure."""
        return self.ours() / self.published - 1

    def is_within(self) -> bool:
        """Return whether the error is accepted as small enough."""
        return abs(self.error()) <= self.tolerance


def _rate(version: int, size: int, width: int, *, half: bool, wide: bool = False) -> float:
    """Return the TFLOP/s of a dense product [size, size] x [size, width]."""
    device = machine_device(version)
    plan = matmul_plan(
        device,
        size,
        size,
        width,
        half=half,
        half_partials=half and not wide,
        float_result=not half,
    )
    return 2 * size * size * width / (plan.cycles / device.clock) / _TERA


def _mean_error(rows: Sequence[Row]) -> float:
    return 1 + statistics.mean(abs(row.error()) for row in rows)


def _best_rate(*, half: bool) -> float:
    """Return the best rate of large products on the first generation."""
    sizes = (1024, 2048, 3072, 4096)
    return max(_rate(1, size, size, half=half, wide=half) for size in sizes)


def _peaks() -> Iterator[Row]:
    sheet = "data sheets; arXiv 1912.03413"
    figures = {
        1: (("half", 124.5), ("float", 31.1), ("memory", 45.0), ("exchange", 7.8)),
        2: (("half", 250.0), ("float", 62.5), ("memory", 47.0), ("exchange", 8.0)),
        21: (("half", 349.0), ("float", 87.0), ("memory", 65.0), ("exchange", 10.9)),
    }
    for version, row in figures.items():
        device = machine_device(version)
        macs = {"half": 32 if version == 1 else 64, "float": 8 if version == 1 else 16}
        for name, published in row:
            flops = {key: 2 * count for key, count in macs.items()}
            each = {**flops, "memory": 24, "exchange": 4}[name]
            unit = "TFLOP/s" if name in macs else "TB/s"
            value = device.tiles * each * device.clock / _TERA
            yield Row(
                "V1", f"{device.name}, peak of {name}", unit, published, _same(value), 0.04, sheet
            )


def _same(value: float) -> Callable[[], float]:
    return lambda: value


def _products() -> Iterator[Row]:
    paper = "PopSparse, arXiv 2303.16999"
    widths = (4, 16, 64, 256, 1024, 2048, 4096, 8192, 16384)
    tables: Sequence[tuple[str, int, bool, Sequence[int], Sequence[float], Sequence[float]]] = (
        (
            *("V4", 1024, True, widths),
            (6.0, 20.3, 45.5, 89.3, 120, 153, 180, 206, 223),
            (5.7, 18.9, 48.8, 89.5, 129, 152, 175, 200, 201),
        ),
        (
            *("V5", 2048, True, widths[:-1]),
            (12.8, 44.3, 82.4, 134, 166, 200, 211, 229),
            (13.1, 39.6, 88.7, 131, 172, 198, 194, 203),
        ),
        (
            *("V6", 1024, False, (4, 16, 64, 256, 512, 1024, 4096, 16384)),
            (3.7, 11.1, 21.2, 34.3, 36.2, 43.6, 55.5, 58.6),
            (3.6, 12.0, 23.4, 35.3, 39.9, 45.5, 56.9, 57.8),
        ),
        (
            *("V7", 2048, False, (4, 16, 64, 256, 1024, 2048, 8192)),
            (5.7, 18.0, 34.3, 44.8, 52.6, 57.0, 60.2),
            (5.7, 19.8, 35.7, 45.4, 55.2, 56.1, 57.8),
        ),
    )
    for number, size, half, columns, published, prototype in tables:
        kind = "half" if half else "float"
        rows = [
            Row(
                number,
                f"{kind} product {size} x {size} x {width}, Bow",
                "TFLOP/s",
                figure,
                partial(_rate, 21, size, width, half=half),
                0.15,
                paper,
                earlier,
            )
            for width, figure, earlier in zip(columns, published, prototype, strict=True)
        ]
        yield from rows
        if number == "V4":
            yield Row(
                "V4",
                "mean error of these",
                "share + 1",
                1.0,
                partial(_mean_error, rows),
                0.07,
                paper,
            )
    citadel = "arXiv 1912.03413, recalled"
    yield Row(
        *("V8", "best float product, Mk1", "TFLOP/s", 18.9),
        *(lambda: _best_rate(half=False), 0.2, citadel, 19.6),
        soft=True,
    )
    yield Row(
        *("V8", "best half product with float sums, Mk1", "TFLOP/s", 58.9),
        *(lambda: _best_rate(half=True), 0.2, citadel, 61.5),
        soft=True,
    )
    yield Row(
        *("V9", "float product 3584 x 3584 x 3584, Mk2", "TFLOP/s", 44.2),
        *(lambda: _rate(2, 3584, 3584, half=False), 0.15, "arXiv 2310.00256, recalled", 40.3),
        soft=True,
    )


def _hand_written() -> Iterator[Row]:
    """Yield the rows of tutorial 6: a matrix-vector product with vertices of its own."""
    tutorial = "Graphcore's tutorial 6 for Poplar"
    rows, columns, split, tiles, workers = 10_000, 1_000, 7, 1_472, 6
    vertices = -(-rows * split // tiles)
    words = -(-columns // split)
    compute = -(-vertices // workers) * (5 + -(-words // 2)) * workers
    yield Row(
        *("V2", "compute cycles of a matrix-vector product", "cycles", 3_696),
        *(_same(compute), 0.0, tutorial, 3_696),
    )
    outputs = -(-rows // tiles)
    reduce = -(-outputs // workers) * (2 + split) * workers
    total = compute + words + outputs * split + reduce
    yield Row(*("V2", "all cycles of it", "cycles", 3_996), *(_same(total), 0.0, tutorial, 3_996))
    steps = 6
    host = 40.04e6 / machine_constant("host, data waiting") * machine_device(2).clock
    exchange = 27.2 * 1024 / 4
    sync = steps * machine_constant("sync")
    yield Row(
        *("V3", "copy of 40.04 MB from the host", "cycles", 6_663_551),
        *(_same(host), 0.05, tutorial),
    )
    yield Row(
        *("V3", "compute of the same program, mean of the tiles", "cycles", 3_717.6),
        *(_same(compute), 0.05, tutorial),
    )
    yield Row(
        *("V3", "exchange of the same program", "cycles", 8_697.4),
        *(_same(exchange), 0.4, tutorial),
    )
    yield Row(*("V3", "sync of the same program", "cycles", 1_134.8), *(_same(sync), 0.4, tutorial))
    yield Row(
        *("V3", "the whole program", "cycles", 6_681_766),
        *(_same(host + compute + exchange + sync), 0.05, tutorial),
    )
    profiling = "Graphcore's tutorial on lightweight profiling"
    for name, published in (
        ("blocking call, before", 82_500),
        ("stream copy", 1_650),
        ("blocking call, after", 82_000),
    ):
        yield Row(
            *("V10", f"stream of 4 bytes: {name}", "cycles", published),
            *(_same(machine_constant(name)), 0.1, profiling),
        )


# --- Whole models -----------------------------------------------------------

_bert = cache(estimate_bert)
_resnet = cache(estimate_resnet)
_on_one_ipu = cache(estimate_on_one_ipu)
_inference = cache(estimate_resnet_inference)
_loading = cache(estimate_loading)


def _cycle(estimate: Estimate) -> float:
    """Return the cycles between micro-batches of a full pipeline."""
    stretch = max(estimate.stretches, key=lambda one: one.times)
    return sum(slot.cycles for slot in stretch.slots)


def _items(estimate: Estimate) -> float:
    rate = estimate.items_per_second
    assert rate is not None
    return rate


def _models() -> Iterator[Row]:
    yield Row(
        *("V11", "ResNet-50, inference, C600, half, batch 4", "images/s", 7_062),
        *(lambda: _items(_inference()), 0.1, "ByteMLPerf", 6_833),
    )
    results = "Graphcore's performance results and examples"
    yield Row(
        *("V12", "BERT-Large pre-training, Bow Pod16, pipeline cycle", "cycles", 12.37e6),
        *(lambda: _cycle(_bert(LARGE)), 0.15, results, 11.1e6),
    )
    yield Row(
        *("V13", "BERT-Base pre-training, Bow Pod16, pipeline cycle", "cycles", 14.88e6),
        *(lambda: _cycle(_bert(BASE)), 0.15, results, 14.5e6),
    )
    yield Row(
        *("V14", "BERT-Large, unpacked, Bow Pod16", "sequences/s", 5_179),
        *(lambda: _items(_bert(LARGE)), 0.2, results),
        soft=True,
    )
    guide = "ALCF user guide"
    for ipus, published in ((4, 9_960), (8, 19_865), (16, 39_057)):
        yield Row(
            *("V15", f"ResNet-50, training, {ipus} Bow IPUs", "images/s", published),
            *(lambda ipus=ipus: _items(_resnet(ipus)), 0.2, guide),
        )
    yield Row(
        *("V15", "ResNet-50, training, 16 IPUs against 4", "times", 39_057 / 9_960),
        *(lambda: _items(_resnet(16)) / _items(_resnet(4)), 0.05, guide),
    )
    yield from _pods(results)
    yield from _data_loading()
    yield from _memory()


def _pods(results: str) -> Iterator[Row]:
    batches = {16: 1920, 64: 2560, 256: 10240}
    for ipus, published in ((16, 42_029), (64, 145_287), (256, 425_514)):
        yield Row(
            *("V16", f"ResNet-50, training, Pod{ipus}", "images/s", published),
            *(lambda ipus=ipus: _pod(ipus, batches[ipus]), 0.3, results),
            soft=True,
        )
    for ipus, times in ((64, 3.46), (256, 10.1)):
        yield Row(
            *("V16", f"ResNet-50, training, Pod{ipus} against Pod16", "times", times),
            *(
                lambda ipus=ipus: _pod(ipus, batches[ipus]) / _pod(16, batches[16]),
                *(0.1, results),
            ),
        )
    yield Row(
        *("V17", "BERT-Large, Pod64 against Pod16", "times", 3.77),
        *(lambda: _items(_bert_on(16)) / _items(_bert_on(4)), 0.07, results),
    )
    yield Row(
        *("V18", "Bow against Mk2, training", "times", 1.368),
        *(
            lambda: _items(_bert(BASE)) / _items(_bert(BASE, version="mk2")),
            *(0.03, "examples: Conformer"),
        ),
    )


def _pod(ipus: int, batch: int) -> float:
    """Return the images per second of ResNet-50 with a global batch and micro-batches of 20."""
    return _items(_resnet(ipus, 20, max(batch // ipus // 20, 1)))


@cache
def _bert_on(replicas: int) -> Estimate:
    """Return the estimate of BERT-Large with the same global batch on several pipelines."""
    sizes = replace(LARGE, accumulation=LARGE.accumulation * 4 // replicas)
    return estimate_bert(sizes, replicas=replicas)


def _data_loading() -> Iterator[Row]:
    tutorial = "Graphcore's tutorial on efficient data loading"
    yield Row(
        *("V19", "small CNN, synthetic data, Mk2", "items/s", 47_031),
        *(lambda: _items(_loading(real=False)), 0.5, tutorial),
    )
    yield Row(
        *("V20", "the same with data of the host, more per micro-batch", "us", 549),
        *(_increment, 0.5, tutorial),
    )


def _increment() -> float:
    real, synthetic = (_loading(real=real) for real in (True, False))
    count = real.batch.device_iterations
    return (real.seconds - synthetic.seconds) / count * 1e6


def _memory() -> Iterator[Row]:
    examples = "shipped configurations"
    fits = {
        "BERT-Large on 4 IPUs": lambda: _bert(LARGE),
        "BERT-Base on 4 IPUs": lambda: _bert(BASE),
        "ResNet-50, training": lambda: _resnet(16),
    }
    for name, found in fits.items():
        yield Row(
            *("V21", f"{name} fits", "yes", 1),
            *(lambda found=found: float(found().verdict != "does not fit"), 0.0, examples),
        )
    yield Row(
        *("V21", "BERT-Large on one IPU does not fit", "yes", 1),
        *(lambda: float(_on_one_ipu().verdict == "does not fit"), 0.0, examples),
    )


def validation_rows(*, fast: bool = False) -> list[Row]:
    """Return the rows of the table.

    Args:
        fast: Leave out whole models, which take seconds each.
    """
    rows = [*_peaks(), *_hand_written(), *_products()]
    return rows if fast else [*rows, *_models()]


def whole_models() -> dict[str, Estimate]:
    """Return the estimates of the models in the table, by name."""
    return {
        "BERT-Large pre-training, 4 Bow IPUs": _bert(LARGE),
        "BERT-Base pre-training, 4 Bow IPUs": _bert(BASE),
        "BERT-Large, training on one Bow IPU": _on_one_ipu(),
        "ResNet-50, training, a Bow IPU": _resnet(16),
        "ResNet-50, inference, C600": _inference(),
        "small CNN, training, Mk2": _loading(real=False),
    }
