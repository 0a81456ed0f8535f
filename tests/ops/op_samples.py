"""Samples of all ops but weight updates and those that the host sees."""

from typing import Any

import torch

from tests.custom_ops import split
from tests.ops.dense_samples import CONVOLUTIONS, MATMULS
from tests.ops.position_samples import POSITIONS
from tests.ops.sample import F16, F32, F64, Sample, channels_last, columns, float32, positive, whole

_ATTENTION = {
    "code": ["mul 0 1"],
    "constants": [0.5],
    "result": 2,
    "shape": [5, 300, 131],
    "safe": False,
}
_MASKED = {"reduction": "mean", "ignore_index": -100}
_GRAD_MASKED = {**_MASKED, "classes": 300, "dtype": "dtype"}
_LABELS = whole(300, 700)
_CTC = {"blank": 0, "zero_infinity": False}
_CTC_BATCH = [
    *((120, 9, 50), 1 + whole(49, 9, 30)),
    *(120 - whole(40, 9), whole(31, 9)),
]
_POOL = {
    "kernel": [3, 3],
    "stride": [2, 2],
    "padding": [1, 1],
    "dilation": [1, 1],
    "ceil": False,
}
_AVERAGE = {
    **_POOL,
    "count_include_pad": True,
    "divisor": 0,
}
_COUNTS = [50, 100, 0, 200, 300, 200, 100]
_BATCH = torch.arange(10)
_IMAGES = (6, 32, 40, 40)
_POOLED = (6, 32, 20, 20)


def recurrent(mode: str, gates: int, batch: int, hidden: int) -> list[Sample]:
    """Return a recurrent layer and its gradient, of 20 steps with 60 inputs."""
    state = (batch, hidden)
    columns_of = gates * hidden
    layer = [
        (20, batch, 60),
        state,
        state if mode == "lstm" else None,
        (columns_of, 60),
        (columns_of, hidden),
    ]
    y = (20, batch, hidden)
    kept = [(20, batch, columns_of), y] if gates > 1 else [None, None]
    bias = (columns_of,)
    attributes = {"mode": mode, "reverse": False}
    return [
        Sample("recurrent", f"{mode}_{batch}", [*layer, bias, bias], [y, *kept], attributes),
        Sample(
            "recurrent_grad",
            f"{mode}_{batch}",
            [y, None, None, *layer, y, *kept],
            [*layer, bias, bias],
            attributes,
        ),
    ]


def average(function: str, x: Any, axes: list[int], out: tuple[int, ...]) -> Sample:
    """Return a reduction."""
    name = f"{function}_{'_'.join(map(str, axes))}"
    attributes = {"function": function, "axes": axes, "keepdim": False, "dtype": "dtype"}
    return Sample("reduce", name, [x], [out], attributes)


def serialized(slices: str) -> Sample:
    """Return a product in slices."""
    return Sample(
        "serialized_matmul",
        slices,
        [(300, 520), columns(520, 400)],
        [(300, 400)],
        {"slices": slices, "factor": 4, "wide_sums": False, "dtype": "dtype"},
    )


OTHERS = [
    *(serialized(slices) for slices in ("rows", "columns", "depth")),
    Sample(
        "attention",
        "kept",
        [(5, 300, 32), (5, 32, 131), (5, 131, 65), None],
        [(5, 300, 65), (5, 300, 131)],
        _ATTENTION,
    ),
    Sample(
        "attention_grad",
        "computed_again",
        [
            *(None, (5, 300, 32), (5, 32, 131), None),
            *((5, 300, 65), (5, 65, 131), (5, 131, 32), (5, 32, 300), (5, 300, 65)),
        ],
        [(5, 300, 32), (5, 32, 131), (5, 131, 65)],
        {
            **_ATTENTION,
            "num_others": 0,
            "grad_code": ["mul 0 1"],
            "grad_constants": [0.5],
            "grad_result": 2,
            "grad_shape": [5, 300, 131],
        },
    ),
    Sample("average_pool", "last", [channels_last(*_IMAGES)], [_POOLED], _AVERAGE),
    Sample(
        "average_pool_grad", "first", [_POOLED], [_IMAGES], {**_AVERAGE, "input_shape": [*_IMAGES]}
    ),
    Sample(
        "max_pool",
        "first",
        [_IMAGES],
        [_POOLED, (torch.int64, _POOLED)],
        {**_POOL, "indices": "int64"},
    ),
    Sample(
        "max_pool_grad",
        "first",
        [_POOLED, whole(1600, *_POOLED)],
        [_IMAGES],
        {**_POOL, "input_shape": [*_IMAGES]},
    ),
    *(
        Sample(
            "batch_norm_statistics",
            name,
            [make(*_IMAGES), (32,), float32(32), positive(32)],
            [(F32, (32,))] * 5,
            {"momentum": 0.1, "epsilon": 1e-5},
        )
        for name, make in {"first": lambda *shape: shape, "last": channels_last}.items()
    ),
    *(
        Sample(
            "batch_norm_grad",
            name,
            [make(*_IMAGES), make(*_IMAGES), float32(32), positive(32), (32,)],
            [(32,), (32,), (F32, (32,)), (F32, (32,)), (F32, (32,))],
        )
        for name, make in {"first": lambda *shape: shape, "last": channels_last}.items()
    ),
    Sample("cat", "middle", [(300, 200, 3), (300, 100, 3)], [(300, 300, 3)], {"axis": 1}),
    Sample("custom", "split", [(500, 700)], [(500, 700), (500, 700)], split.attributes()),
    Sample("copy", "transposed", [columns(500, 700)], [(500, 700)]),
    Sample("copy", "converted", [(500, 700)], [(F64, (500, 700))], {"dtype": "float64"}),
    Sample("copy", "plain", [(500, 700)], [(500, 700)]),
    Sample(
        "ctc_beam_search",
        "items",
        [lambda normal: normal(30, 9, 40).log_softmax(2), 30 - whole(20, 9)],
        [(9, 3), (torch.int64, (9, 3)), (torch.int64, (9, 3, 30))],
        {"blank": 0, "beam_width": 20, "top_paths": 3},
    ),
    Sample("ctc_loss", "padded", _CTC_BATCH, [(9,), (F32, (120, 549))], _CTC),
    Sample(
        "ctc_loss_grad",
        "padded",
        [(9,), *_CTC_BATCH, float32(120, 549)],
        [(120, 9, 50)],
        _CTC,
    ),
    Sample(
        "dynamic_slice",
        "wrapped",
        [(300, 200, 3), torch.tensor(150)],
        [(300, 100, 3)],
        {"axis": 1, "count": 100},
    ),
    Sample(
        "dynamic_update",
        "wrapped",
        [(300, 200, 3), (300, 100, 3), torch.tensor(150)],
        [(300, 200, 3)],
        {"axis": 1},
    ),
    Sample(
        "into_zeros",
        "columns",
        [(500, 300)],
        [(500, 700)],
        {"shape": [500, 700], "strides": [700, 2], "offset": 1},
    ),
    Sample("cumsum", "columns", [(700, 501)], [(700, 501)], {"axis": 0}),
    Sample("cumsum", "rows", [(700, 501)], [(700, 501)], {"axis": 1}),
    Sample("cumsum", "one_row", [(350000,)], [(350000,)], {"axis": 0}),
    Sample("embedding", "rows", [(5000, 80), whole(5000, 3000)], [(3000, 80)]),
    Sample(
        "embedding_grad",
        "rows",
        [(9000, 80), whole(700, 9000)],
        [(700, 80)],
        {"rows": 700, "padding_index": 3},
    ),
    Sample(
        "group_norm",
        "affine",
        [_IMAGES, (32,), (32,)],
        [_IMAGES, (F32, (6, 4)), (F32, (6, 4))],
        {"groups": 4, "epsilon": 1e-5},
    ),
    Sample(
        "group_norm_grad",
        "affine",
        [_IMAGES, _IMAGES, float32(6, 4), positive(6, 4), (32,)],
        [_IMAGES, (32,), (32,)],
        {"groups": 4},
    ),
    Sample(
        "layer_norm",
        "affine",
        [(900, 300), (300,), (300,)],
        [(900, 300), (F32, (900, 1)), (F32, (900, 1))],
        {"axes": 1, "epsilon": 1e-5},
    ),
    Sample(
        "layer_norm_grad",
        "affine",
        [(900, 300), (900, 300), float32(900, 1), positive(900, 1), (300,)],
        [(900, 300), (300,), (300,)],
        {"axes": 1},
    ),
    Sample(
        "map",
        "chain",
        [(700, 501), (501,)],
        [(700, 501)],
        {
            "code": ["exp 0", "add 2 1", "tanh 3", "mul 4 0"],
            "constants": [],
            "results": [5],
            "dtypes": ["dtype"],
        },
    ),
    Sample(
        "fps",
        "segments",
        [(2000, 3), lambda normal: normal(7).float().sigmoid()],
        [(torch.int64, (950,))],
        {"bounds": [100 * b for b in (0, 1, 3, 3, 7, 13, 17, 19)], "counts": _COUNTS},
    ),
    Sample("nearest", "rows", [(3000, 5), (1000, 5)], [(torch.int64, (3000,))]),
    Sample(
        "nearest",
        "batches",
        [(3000, 5), (1000, 5), _BATCH.repeat_interleave(300), _BATCH.repeat_interleave(100)],
        [(torch.int64, (3000,))],
    ),
    Sample("nll_loss", "mean", [(700, 300), _LABELS, (300,)], [(), ()], _MASKED),
    Sample(
        "nll_loss_grad",
        "mean",
        [(), positive(), _LABELS, None],
        [(700, 300)],
        _GRAD_MASKED,
        dtypes=(F32,),
    ),
    Sample(
        "cross_entropy_grad",
        "mean",
        [(), positive(), _LABELS, None, (700, 300)],
        [(700, 300)],
        _GRAD_MASKED,
        dtypes=(F32,),
    ),
    Sample(
        "random",
        "normal",
        [],
        [(700, 501)],
        {
            "distribution": "normal",
            "shape": [700, 501],
            "dtype": "dtype",
            "mean": 0.5,
            "std": 2.0,
            "stream": 3,
        },
    ),
    *recurrent("lstm", 4, batch=48, hidden=72),
    *recurrent("gru", 3, batch=3, hidden=200),
    *recurrent("rnn_tanh", 1, batch=48, hidden=72),
    average("sum", (700, 501), [0, 1], ()),
    average("mean", (700, 501), [0], (501,)),
    average("sum", (700, 501), [1], (700,)),
    average("sum", (40, 9, 1100), [0, 2], (9,)),
    average("amax", (700, 501), [0, 1], ()),
    Sample(
        "softmax", "rows", [(900, 300)], [(900, 300)], {"axis": 1, "log": True, "dtype": "dtype"}
    ),
    Sample(
        "softmax",
        "columns",
        [(20, 90, 300)],
        [(20, 90, 300)],
        {"axis": 1, "log": False, "dtype": "dtype"},
    ),
    Sample(
        "softmax_grad",
        "rows",
        [(900, 300), (900, 300)],
        [(900, 300)],
        {"axis": 1, "log": False, "dtype": "dtype"},
    ),
    Sample(
        "numbers",
        "a correction",
        [float32(), float32()],
        [(F32, ())],
        {
            "code": ["abs 0", "pow 3 1", "sub 2 4"],
            "constants": [1.0],
            "results": [5],
            "dtypes": ["float32"],
        },
        dtypes=(F32,),
    ),
    Sample("within", "rows", [(700, 501)], [], {"least": -9.0, "most": 9.0, "message": "bad"}),
    Sample(
        "stochastic_round",
        "whole",
        [float32(700, 501)],
        [(F16, (700, 501))],
        {"stream": 3},
        dtypes=(F32,),
    ),
]
SAMPLES = [*MATMULS, *CONVOLUTIONS, *POSITIONS, *OTHERS]
