"""Samples of ops with positions, along axes, and of interpolation."""

from collections.abc import Callable

import torch

from tests.ops.sample import F32, Make, Sample, columns, whole

_I64 = torch.int64


def _factors(*shape: int) -> Make:
    """Return numbers whose products stay near to 1."""

    def make(normal: Callable[..., torch.Tensor]) -> torch.Tensor:
        return 1 + normal(*shape) / 16

    return make


def _resampled(mode: str, x: tuple[int, ...], y: tuple[int, ...], **settings: bool) -> list[Sample]:
    """Return an interpolation and its gradient."""
    name = "_".join((mode, str(len(x) - 2), *settings))
    attributes = {"scales": [0.0] * (len(x) - 2), "mode": mode, **settings}
    return [
        Sample("resample", name, [x], [y], {"size": [*y[2:]], **attributes}),
        Sample("resample_grad", name, [y], [x], {"input_size": [*x[2:]], **attributes}),
    ]


def _scattered(function: str, shape: tuple[int, ...], axis: int, *, keeps: bool = True) -> Sample:
    """Return a combination of as many elements as the result has."""
    index = whole(shape[axis], *shape)
    attributes = {"axis": axis, "function": function, "include_self": keeps}
    name = f"{function}_{axis}"
    return Sample("scatter_reduce", name, [shape, index, shape], [shape], attributes)


_OFFSETS = torch.arange(0, 9000, 9)
_BAGS = [whole(700, 9000), _OFFSETS]
_LARGEST = whole(700, 1000, 80) - 1

POSITIONS = [
    Sample("cumprod", "columns", [_factors(700, 501)], [(700, 501)], {"axis": 0}),
    Sample("cumprod", "rows", [_factors(700, 501)], [(700, 501)], {"axis": 1}),
    *(
        Sample(
            "cumprod_grad",
            f"axis_{axis}",
            [(700, 501), _factors(700, 501), _factors(700, 501)],
            [(700, 501)],
            {"axis": axis},
            dtypes=(F32,),
        )
        for axis in (0, 1)
    ),
    *(
        Sample(
            "running_extreme",
            f"{function}_{axis}",
            [(700, 501)],
            [(700, 501), (_I64, (700, 501))],
            {"axis": axis, "function": function},
        )
        for axis, function in enumerate(("max", "min"))
    ),
    Sample("logcumsumexp", "columns", [(700, 501)], [(700, 501)], {"axis": 0}),
    Sample("logcumsumexp", "rows", [(701, 500)], [(701, 500)], {"axis": 1}),
    Sample(
        "embedding_bag",
        "mean",
        [(700, 80), *_BAGS],
        [(1000, 80), (_I64, (9000,)), (_I64, (1000,)), (_I64, (1000,))],
        {"mode": "mean", "padding_index": 3},
    ),
    Sample(
        "embedding_bag",
        "max",
        [(700, 80), *_BAGS],
        [(1000, 80), (_I64, (9000,)), (_I64, (1000,)), (_I64, (1000, 80))],
        {"mode": "max"},
    ),
    Sample(
        "embedding_bag",
        "weighted",
        [columns(700, 80), *_BAGS, (9000,)],
        [(1000, 80), None, None, None],
        {"mode": "sum"},
    ),
    Sample(
        "embedding_bag_grad",
        "mean",
        [(1000, 80), *_BAGS],
        [(700, 80)],
        {"mode": "mean", "rows": 700, "padding_index": 3},
    ),
    Sample(
        "embedding_bag_grad",
        "max",
        [(1000, 80), *_BAGS, _LARGEST],
        [(700, 80)],
        {"mode": "max", "rows": 700},
    ),
    Sample(
        "embedding_bag_grad",
        "weighted",
        [(1000, 80), *_BAGS, None, (9000,)],
        [(700, 80)],
        {"mode": "sum", "rows": 700},
    ),
    Sample(
        "embedding_bag_weights_grad",
        "rows",
        [(1000, 80), (700, 80), *_BAGS],
        [(9000,)],
        {"padding_index": 3},
    ),
    *_resampled("nearest", (6, 32, 20, 21), (6, 32, 40, 42)),
    *_resampled("nearest_exact", (6, 32, 300), (6, 32, 500)),
    *_resampled("linear", (6, 32, 20, 21), (6, 32, 40, 33)),
    *_resampled("linear", (6, 8, 9, 20, 21), (6, 8, 12, 40, 33), align_corners=True),
    *_resampled("cubic", (6, 32, 20, 21), (6, 32, 40, 33)),
    *_resampled("cubic", (6, 32, 40, 41), (6, 32, 20, 33), antialias=True),
    *_resampled("linear", (6, 32, 40, 41), (6, 32, 20, 33), antialias=True),
    Sample(
        "take_grid",
        "planes",
        [(70, 50, 41), whole(50, 110), whole(41, 90)],
        [(70, 110, 90)],
        {"axis": 1},
    ),
    Sample("take_grid", "rows", [(700, 80), whole(700, 9000)], [(9000, 80)], {"axis": 0}),
    _scattered("sum", (700, 501), 0),
    _scattered("sum", (700, 501), 1),
    _scattered("mean", (30, 100, 70), 1, keeps=False),
    _scattered("amax", (700, 501), 0),
    _scattered("amin", (700, 501), 1, keeps=False),
    Sample(
        "scatter_reduce",
        "rows",
        [(700, 80), whole(700, 9000, 1).expand(9000, 80), (9000, 80)],
        [(700, 80)],
        {"axis": 0, "function": "sum"},
    ),
]
