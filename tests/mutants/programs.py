"""Good programs, which together use every op of the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import popsim_torch as poptorch
from popsim_torch.enums import PipelineSchedule
from popsim_torch.executor import compile as compile_path
from popsim_torch.ir import LoopCounts, Phase, Program, TensorKind
from popsim_torch.statistics import (
    Channels,
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    Sample,
    TopK,
    attributes_of,
    length_of,
)
from tests.custom_ops import split


@dataclass(frozen=True)
class Compiled:
    """What the compile path hands to C++.

    Attributes:
        program: The lowered model.
        loop: How often a call runs it.
        training: Whether it has a backward pass.
        schedule: Its schedule.
    """

    program: Program
    loop: LoopCounts
    training: bool
    schedule: PipelineSchedule


def compiled(model: poptorch.PoplarExecutor, *args: torch.Tensor) -> Compiled:
    """Compile a model and return what reached C++."""
    with mock.patch.object(
        compile_path, "build_executable", wraps=compile_path.build_executable
    ) as build:
        model.compile(*args)
    (program, loop), options = build.call_args
    return Compiled(program, loop, options["training"], options["schedule"])


def _options(**attributes: Any) -> poptorch.Options:
    options = poptorch.Options().showCompilationProgressBar(False)
    options.outputMode(poptorch.OutputMode.All)
    for name, value in attributes.items():
        getattr(options.Training if hasattr(options.Training, name) else options, name)(value)
    return options


def _training(
    module: nn.Module, optimizer: Any, *args: torch.Tensor, options: poptorch.Options | None = None
) -> Compiled:
    optimizer = optimizer(module.parameters())
    return compiled(poptorch.trainingModel(module, options or _options(), optimizer), *args)


class _Losses(nn.Module):
    """The body's result and its loss."""

    def __init__(self, body: nn.Module, loss: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.body = body
        self._loss = loss

    def forward(self, x, target):
        y = self.body(x)
        return y, poptorch.identity_loss(self._loss(y, target), "none")


def mlp() -> Compiled:
    """Linear layers and plain SGD, whose updates ride on the products."""
    body = nn.Sequential(
        nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 5)
    )
    module = _Losses(body, F.cross_entropy)
    optimizer = functools.partial(poptorch.optim.SGD, lr=0.1)
    return _training(module, optimizer, torch.randn(6, 12), torch.randint(0, 5, (6,)))


def accumulation() -> Compiled:
    """Several micro-batches per update, clipped, with anchors of every mode."""
    body = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 4))
    options = _options(deviceIterations=3, gradientAccumulation=2)
    for name, tensor, mode in (
        ("all", "Gradient___body.0.weight", "All"),
        ("sum", "body/1/Gelu:0", "Sum"),
        ("final", "Gradient___body.2.bias", "Final"),
        ("weight", "UpdatedVar___body.2.weight", "Final"),
        ("accumulated", "Accum___body.0.bias", "Final"),
    ):
        options.anchorTensor(name, tensor, getattr(poptorch.OutputMode, mode))
    options.anchorTensor("some", "body/0/Gemm:0", poptorch.OutputMode.EveryN, 3)
    optimizer = functools.partial(poptorch.optim.Adam, lr=0.1, max_grad_norm=1.0, loss_scaling=4.0)
    module = _Losses(body, F.mse_loss)
    return _training(module, optimizer, torch.randn(12, 6), torch.randn(12, 4), options=options)


def images() -> Compiled:
    """Convolutions, batch norm, pooling and momentum."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 6, 3, padding=1)
            self.norm = nn.BatchNorm2d(6)
            self.second = nn.Conv2d(6, 4, 3, stride=2)
            self.transposed = nn.ConvTranspose2d(4, 6, 2, stride=2)
            self.groups = nn.GroupNorm(2, 6)
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            x = F.max_pool2d(F.relu(self.norm(self.first(x))), 3, 2, 1)
            x = F.avg_pool2d(self.transposed(self.second(x)), 2)
            return self.last(F.adaptive_avg_pool2d(self.groups(x), 1).flatten(1))

    optimizer = functools.partial(poptorch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
    module = _Losses(Body(), F.cross_entropy)
    return _training(module, optimizer, torch.randn(2, 3, 12, 12), torch.randint(0, 3, (2,)))


def attention() -> Compiled:
    """Attention as one op, forward and backward, with a mask."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.projection = nn.Linear(32, 96)

        def forward(self, x):
            q, k, v = self.projection(x).view(2, 128, 3, 2, 16).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-2, -1) * 0.25
            mask = torch.ones(128, 128, dtype=torch.bool).tril()
            weights = scores.masked_fill(~mask, -1e4).softmax(-1)
            return (weights @ v).transpose(1, 2).flatten(2)

    optimizer = functools.partial(poptorch.optim.AdamW, lr=0.1)
    module = _Losses(Body(), F.l1_loss)
    return _training(module, optimizer, torch.randn(2, 128, 32), torch.randn(2, 128, 32))


def recurrent() -> Compiled:
    """An LSTM, a GRU and a plain recurrent layer, and combined SGD."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(5, 6)
            self.gru = nn.GRU(6, 4, bidirectional=True)
            self.rnn = nn.RNN(8, 3)

        def forward(self, x):
            x, (h, _) = self.lstm(x)
            x, _ = self.gru(x)
            x, last = self.rnn(x)
            return x + last + h.sum()

    optimizer = functools.partial(poptorch.optim.SGD, lr=0.1, momentum=0.9, use_combined_accum=True)
    return _training(
        _Losses(Body(), F.smooth_l1_loss),
        optimizer,
        torch.randn(8, 3, 5),
        torch.randn(8, 3, 3),
        options=_options(gradientAccumulation=2),
    )


def pipeline() -> Compiled:
    """Two stages with recomputation."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU())
            self.second = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 3))

        def forward(self, x):
            with poptorch.Block("first", ipu_id=0):
                x = self.first(x)
            with poptorch.Block("second", ipu_id=1):
                return self.second(x)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Body()

        def forward(self, x, target):
            y = self.body(x)
            with poptorch.Block("loss", ipu_id=1):
                return y, poptorch.identity_loss(F.cross_entropy(y, target), "none")

    options = _options(gradientAccumulation=4)
    options.setExecutionStrategy(
        poptorch.PipelinedExecution(
            poptorch.Stage("first").ipu(0), poptorch.Stage("second", "loss").ipu(1)
        )
    )
    optimizer = functools.partial(poptorch.optim.RMSprop, lr=0.1, momentum=0.9, centered=True)
    return _training(
        Model(), optimizer, torch.randn(8, 6), torch.randint(0, 3, (8,)), options=options
    )


def rounded() -> Compiled:
    """float16 rounded at random, in the update too."""
    body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4)).half()
    options = _options(gradientAccumulation=2)
    options.Precision.enableStochasticRounding(True)
    optimizer = functools.partial(poptorch.optim.AdamW, lr=0.1, accum_type=torch.float16)
    data = (torch.randn(4, size).half() for size in (6, 4))
    return _training(_Losses(body, F.mse_loss), optimizer, *data, options=options)


def traced() -> Compiled:
    """Updates by the step of an optimizer that has no op of its own."""
    body = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4))
    optimizer = functools.partial(torch.optim.Adagrad, lr=0.1)
    return _training(_Losses(body, F.mse_loss), optimizer, torch.randn(4, 6), torch.randn(4, 4))


def words() -> Compiled:
    """Embeddings, norms, prints, random numbers, and losses that are not fused; float16 inside."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(11, 6, padding_idx=0)
            self.norm = nn.LayerNorm(6)
            self.last = nn.Linear(12, 4)

        def forward(self, indices):
            x = self.norm(self.table(indices))
            x = F.dropout(x, 0.3) + torch.rand(6)
            x = torch.cat([x, x[:, :2].mean(1, keepdim=True).expand(-1, 5, -1)], 2)
            x = poptorch.ipu_print_tensor(x[:, 1:4], "part")
            weights = torch.softmax(x.sum(2).half(), 1).float()
            y = self.last((x * weights.unsqueeze(2)).amax(1))
            return y.flip(1) + y.logsumexp(1, keepdim=True)

    optimizer = functools.partial(poptorch.optim.LAMB, lr=0.1)
    module = _Losses(Body(), lambda y, target: F.nll_loss(y, target, reduction="mean"))
    return _training(module, optimizer, torch.randint(0, 11, (3, 5)), torch.randint(0, 4, (3,)))


def speech() -> Compiled:
    """Labels of sequences whose alignment is not known."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(4, 5)
            self.loss = nn.CTCLoss(zero_infinity=True)

        def forward(self, x, targets, input_lengths, target_lengths):
            y = self.last(x).log_softmax(2)
            return y, self.loss(y.transpose(0, 1), targets, input_lengths, target_lengths)

    optimizer = functools.partial(poptorch.optim.SGD, lr=0.1)
    lengths = torch.tensor([6, 4, 5]), torch.tensor([2, 0, 3])
    targets = torch.randint(1, 5, (3, 3))
    return _training(Model(), optimizer, torch.randn(3, 6, 4), targets, *lengths)


def positions() -> Compiled:
    """Bags of rows, sums at positions, running products and extremes, and interpolation."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(7, 6, mode="sum")
            self.largest = nn.EmbeddingBag(7, 6, mode="max")
            self.weights = nn.Parameter(torch.rand(3, 4))

        def forward(self, indices):
            x = self.bag(indices, per_sample_weights=self.weights) + self.largest(indices)
            x = x.cumprod(1) + x.cummax(0)[0] + x.logcumsumexp(1)
            x = x.index_add(0, indices[:, 0] % 3, x)
            return F.interpolate(x[None], size=9, mode="linear")[0]

    optimizer = functools.partial(poptorch.optim.SGD, lr=0.1)
    module = _Losses(Body(), F.mse_loss)
    return _training(module, optimizer, torch.randint(0, 7, (3, 4)), torch.randn(3, 9))


def slices() -> Compiled:
    """Products in slices, parts whose place a run tells, a checkpoint."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 8))
            self.last = nn.Linear(8, 4)

        def forward(self, x, start):
            mode = poptorch.MatMulSerializationMode
            x = poptorch.serializedMatMul(x, self.weight, mode.OutputChannels, 4)
            part = poptorch.dynamic_slice(x, 1, start, 4, 2)
            x = poptorch.dynamic_update(x, part.tanh(), 1, start, 2)
            return checkpoint(lambda x: self.last(torch.sigmoid(x)), x, use_reentrant=False)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Body()

        def forward(self, x, start, target):
            y = self.body(x, start)
            return y, poptorch.identity_loss(F.mse_loss(y, target), "none")

    optimizer = functools.partial(poptorch.optim.SGD, lr=0.1)
    data = torch.randn(4, 6), torch.tensor([3]), torch.randn(4, 4)
    return _training(Model(), optimizer, *data)


def control() -> Compiled:
    """Loops and branches inside of each other, with their gradients and an anchor inside."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.last = nn.Linear(4, 3)

        def forward(self, x, target):
            def step(y, number):
                (scaled,) = poptorch.cond(
                    *(y.sum() > 0, lambda y: y * 2, [y], lambda y, x: y - x, [y, x])
                )
                return torch.tanh(self.inner(F.dropout(scaled))), number + 1

            y, number = poptorch.for_loop(3, step, [x, torch.zeros(2, dtype=torch.int32)])
            loss = F.cross_entropy(self.last(y), target)
            return number, loss

    options = _options()
    options.anchorTensor("inside", "Tanh:0")
    optimizer = functools.partial(poptorch.optim.SGD, lr=0.1)
    return _training(
        Model(), optimizer, torch.randn(2, 4), torch.randint(0, 3, (2,)), options=options
    )


def searches() -> Compiled:
    """Points, what is gathered by their numbers, and decoded labels."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(3, 4)

        def forward(self, x, scores, lengths):
            first = poptorch.fps(x, [0, 3, 9], 0.5)
            some = poptorch.fps(x, [0, 4, 4, 8], 0.7, random_start=True)
            rows = poptorch.nearest(x, x[some], [0] * 4 + [1] * 5, [0] * 3 + [1] * 3)
            labels = poptorch.ctc_beam_search_decoder(scores, lengths, beam_width=4, top_paths=2)
            return poptorch.nearest(x, x[first]), self.last(x[some][rows]), labels

    model = poptorch.inferenceModel(Model(), _options())
    lengths = torch.tensor([5, 0, 3])
    return compiled(model, torch.randn(9, 3), torch.randn(5, 3, 4), lengths)


def custom() -> Compiled:
    """An operator of the user's own."""

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 4)

        def forward(self, x):
            y = self.first(x)
            below, above = poptorch.custom_op(
                [y], split.NAME, split.DOMAIN, 1, [y, y], {"scale": 0.5, "signs": ["a", "b"]}
            )
            return above - 2 * below

    optimizer = functools.partial(poptorch.optim.SGD, lr=0.1)
    return _training(_Losses(Body(), F.mse_loss), optimizer, torch.randn(3, 6), torch.randn(3, 4))


def inference() -> Compiled:
    """The long tail, a buffer that forward changes, and half-precision products."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 8).half()
            self.calls = nn.Buffer(torch.zeros(8))

        def forward(self, x, indices):
            y = self.first(x.half()).float()
            self.calls += y.mean(0)
            top, positions = y.topk(3, dim=1)
            parts = y.split([3, 5], dim=1)
            return (
                top.sort(descending=True)[0].cumprod(1).cumsum(1),
                positions,
                y.gather(1, indices) + self.calls[:2],
                torch.nan_to_num(parts[1]).std(1),
                y.t().contiguous().view(-1).bernoulli(0.5),
                torch.linalg.vector_norm(parts[0], dim=1),
            )

    options = _options(deviceIterations=2)
    model = poptorch.inferenceModel(Model(), options)
    return compiled(model, torch.randn(8, 6), torch.randint(0, 8, (8, 2)))


def host() -> Compiled:
    """Code of the host in the middle of forward, and its gradient."""

    def three(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * y, x.argmax(), y.half()

    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
            self.cpu = poptorch.CPU(three, "three")

        def forward(self, x):
            x = self.first(x)
            product, position, half = self.cpu(x, x[:1])
            return self.last(product + position + half)

    module = _Losses(Body(), F.mse_loss)
    optimizer = functools.partial(poptorch.optim.SGD, lr=0.1)
    options = _options(gradientAccumulation=2)
    return _training(module, optimizer, torch.randn(6, 4), torch.randn(6, 2), options=options)


def processes() -> Compiled:
    """Combined SGD in one of two processes, compiled where the other one is not."""
    body = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    options = _options(connectionType=poptorch.ConnectionType.Never)
    options.Distributed.configureProcessId(1, 2)
    make = functools.partial(poptorch.optim.SGD, lr=0.1, momentum=0.9, use_combined_accum=True)
    module = _Losses(body, F.mse_loss)
    return _training(module, make, torch.randn(2, 4), torch.randn(2, 3), options=options)


def feeds() -> Compiled:
    """A loop that trains, enqueues, and ends when a value says so."""
    layer, x = nn.Linear(4, 2), torch.randn(3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    outfeed, gradients = poptorch.OutfeedQueue(), poptorch.OutfeedQueue()

    def step(total, count):
        hidden = layer(x)
        loss = hidden.pow(2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outfeed.enqueue({"loss": loss, "count": count, "transposed": hidden.T})
        gradients.enqueue(layer.weight.grad)
        return total + loss.detach(), count + 1

    @poptorch.function
    def train():
        return poptorch.while_loop(lambda total, count: count < 3, step, [0.0, 0])

    with mock.patch.object(
        compile_path, "build_executable", wraps=compile_path.build_executable
    ) as build:
        train()
    (program, loop), options = build.call_args_list[0]
    loop = LoopCounts(4, loop.gradient_accumulation)
    return Compiled(program, loop, options["training"], options["schedule"])


def observed() -> Compiled:
    """Statistics of weights, and of what a model computes, where they are, and a check."""
    body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    good = compiled(poptorch.inferenceModel(body, _options()), torch.randn(5, 4))
    graph = good.program.graph
    asked = [Moments(), Counts(), Histogram(1), TopK(3), Sample(4), Channels()]
    written = [graph.tensors[i] for op in graph.ops for i in op.outputs]
    for tensor in [*graph.of_kind(TensorKind.VARIABLE), *written]:
        requests = [*asked, Fingerprint()] if tensor.kind == TensorKind.VALUE else asked
        attributes = attributes_of(requests, len(tensor.shape))
        length = length_of(requests, tensor.shape)
        out = graph.add_tensor(TensorKind.VALUE, torch.float64, (length,))
        graph.add_op(
            *("statistics", [tensor], [out], attributes),
            phase=Phase.FORWARD,
            name=f"Statistics___{tensor.name}",
        )
    position = graph.add_tensor(TensorKind.VALUE, torch.int64, (2,))
    graph.add_op("position", [], [position], {}, phase=Phase.FORWARD, name="position")
    checks = {"kept": 0, "divisors": 0, "limit": 0.0, "after": False, "late": False}
    weight = graph.of_kind(TensorKind.VARIABLE)[0]  # (no mutant makes it infinite)
    graph.add_op("finite", [weight], [], checks, phase=Phase.FORWARD, name="check")
    bounds = {"least": -1e30, "most": 1e30, "message": "outside"}
    graph.add_op("within", [weight], [], bounds, phase=Phase.FORWARD, name="bounds")
    return good


PROGRAMS: dict[str, Callable[[], Compiled]] = {
    program.__name__: program
    for program in (
        *(mlp, accumulation, images, attention, recurrent),
        *(
            pipeline,
            rounded,
            traced,
            words,
            speech,
            searches,
            control,
            slices,
            positions,
            custom,
            inference,
            host,
            processes,
            feeds,
            observed,
        ),
    )
}


@functools.cache
def program(name: str) -> Compiled:
    """Return a program, compiled once for all tests."""
    torch.manual_seed(1)
    return PROGRAMS[name]()
