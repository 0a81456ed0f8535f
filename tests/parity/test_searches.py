"""``fps``, ``nearest`` and ``ctc_beam_search_decoder`` in models, against the same on the host."""

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch import OutputMode
from popsim_torch.passes.recompute_choice import Recomputation
from tests.options import make_options
from tests.parity.compare import Loop, Pair, quiet_options
from tests.parity.tolerances import TRAINED

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
SEGMENTS = [0, 5, 5, 12]


class Function(nn.Module):
    """A model without parameters."""

    def __init__(self, function):
        super().__init__()
        self._function = function

    def forward(self, *args):
        return self._function(*args)


def infer(function, *args, options=None):
    """Return what a function gives inside of a model."""
    return poptorch.inferenceModel(Function(function), options or quiet_options())(*args)


def assert_same(ours, expected):
    """Compare bit by bit: the device has numbers of 32 bits."""
    if isinstance(expected, tuple):
        for one, other in zip(ours, expected, strict=True):
            assert_same(one, other)
        return
    assert ours.dtype == (torch.int32 if expected.dtype == torch.int64 else expected.dtype)
    assert torch.equal(ours, expected.to(ours.dtype))


FUNCTIONS = {
    "fps": (lambda x: poptorch.fps(x, SEGMENTS, 0.6), [(12, 3)]),
    "fps of numbers": (lambda x: poptorch.fps(x, [2, 9], ratio=1.0), [(12,)]),
    "nearest": (poptorch.nearest, [(9, 2), (14, 2)]),
    "nearest of numbers": (poptorch.nearest, [(9,), (14, 1)]),
    "nearest with lists": (
        lambda x, y: poptorch.nearest(x, y, [0, 0, 0, 4], (0, 0, 4)),
        [(4, 2), (3, 2)],
    ),
    "nearest with one batch": (
        lambda x, y: poptorch.nearest(x, y, batch_y=[0, 0, 1]),
        [(4, 2), (3, 2)],
    ),
    "decoder": (
        lambda x, n: poptorch.ctc_beam_search_decoder(x, n, 2, beam_width=6, top_paths=3),
        [(7, 3, 4), torch.tensor([7, 4, 0])],
    ),
    "decoder with defaults": (
        poptorch.ctc_beam_search_decoder,
        [(7, 3, 4), torch.tensor([7, 4, 0], dtype=torch.int16)],
    ),
}


@DTYPES
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_model_and_the_host_give_the_same(name, dtype):
    function, given = FUNCTIONS[name]
    args = [torch.randn(a).to(dtype) if isinstance(a, tuple) else a for a in given]
    assert_same(infer(function, *args), function(*args))


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8])
def test_batches_of_the_device(kind):
    batches = torch.tensor([0, 0, 1, 3]), torch.tensor([0, 1, 1, 2, 3])
    args = (torch.randn(4, 3), torch.randn(5, 3), *(b.to(kind) for b in batches))
    rows = poptorch.nearest(*args)
    assert [int(args[3][row]) for row in rows] == [0, 0, 1, 3]
    assert_same(infer(poptorch.nearest, *args), rows)


def test_operands_of_two_types():
    x, y = torch.randn(6, 3).half(), torch.randn(8, 3)
    expected = poptorch.nearest(x.float(), y)
    assert_same(infer(poptorch.nearest, x, y), expected)
    assert torch.equal(poptorch.nearest(x, y.double()), expected)


def test_constants_of_the_host():
    """A table that forward knows, in front of an input and by itself."""
    table = torch.randn(9, 3)

    def function(x):
        return poptorch.nearest(x, table), x[poptorch.nearest(table[:2], table[1:5])]

    x = torch.randn(4, 3)
    rows, found = infer(function, x)
    assert_same(rows, poptorch.nearest(x, table))
    assert torch.equal(found, x[poptorch.nearest(table[:2], table[1:5])])


@pytest.mark.parametrize("name", ["fps", "nearest", "decoder"])
def test_every_micro_batch(name):
    """Micro-batches differ in values, and in the lengths that are read at run time."""
    counts = (1, 5)
    x = torch.randn(5, 12, 3)
    y = torch.randn(5, 7, 3)
    lengths = torch.tensor([[12], [3], [0], [7], [12]])
    functions = {
        "fps": lambda x, y, n: poptorch.fps(x[0], SEGMENTS),
        "nearest": lambda x, y, n: poptorch.nearest(x[0], y[0]),
        "decoder": lambda x, y, n: poptorch.ctc_beam_search_decoder(x.transpose(0, 1), n[0])[2],
    }
    options = quiet_options().deviceIterations(counts[1]).outputMode(OutputMode.All)
    ours = infer(functions[name], x, y, lengths, options=options)
    each = [functions[name](x[i : i + 1], y[i : i + 1], lengths[i : i + 1]) for i in range(5)]
    assert_same(ours, torch.cat(each))


# In training


class Interpolation(nn.Module):
    """Features of some points, brought to all of them by the nearest one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, points, target):
        points = points[0]
        some = poptorch.fps(points, SEGMENTS, 0.5)
        rows = poptorch.nearest(points, points[some], [0] * 5 + [1] * 7, [0] * 3 + [1] * 4)
        y = self.last(torch.tanh(self.first(points[some]))[rows])
        return y, nn.functional.mse_loss(y, target[0])


@pytest.mark.parametrize("loop", [Loop(), Loop(2, 3)], ids=str)
def test_training_through_what_is_gathered(loop):
    pair = Pair(
        Interpolation(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        tolerance=TRAINED[torch.float32],
        loop=loop,
    )
    for _ in range(3):
        pair.step(torch.randn(loop.micro_batches, 12, 3), torch.randn(loop.micro_batches, 12, 2))
    pair.finish()


def test_no_gradient_goes_through_a_search():
    """Points that are learnt get a gradient from the loss of what is gathered, and no other."""

    class Centres(nn.Module):
        def __init__(self):
            super().__init__()
            self.centres = nn.Parameter(torch.randn(4, 2))

        def forward(self, x):
            rows = poptorch.nearest(x, self.centres)
            first = poptorch.fps(self.centres, [0, 4], 0.25)
            found = self.centres[rows] + self.centres[first]
            return rows, poptorch.identity_loss((x - found).square(), "mean")

    model, x = Centres(), torch.randn(20, 2)
    rows, loss = model(x)
    loss.backward()
    expected = model.centres.detach() - 0.5 * model.centres.grad
    training = poptorch.trainingModel(
        model, quiet_options(), poptorch.optim.SGD(model.parameters(), lr=0.5)
    )
    assert_same(training(x)[0], rows)
    training.copyWeightsToHost()
    torch.testing.assert_close(model.centres.detach(), expected)


def test_the_decoder_beside_a_loss():
    class Recogniser(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 5)
            self.loss = nn.CTCLoss()

        def forward(self, x, targets, lengths, target_lengths):
            y = self.fc(x).log_softmax(2)
            labels = poptorch.ctc_beam_search_decoder(y, lengths, beam_width=8, top_paths=2)
            return y, *labels, self.loss(y, targets, lengths, target_lengths)

    model = Recogniser()
    args = (torch.randn(6, 3, 4), torch.randint(1, 5, (3, 2)))
    args += (torch.tensor([6, 4, 5]), torch.tensor([2, 1, 2]))
    loss = model(*args)[-1]
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, quiet_options(), optimizer)
    y, *found, ours = training(*args)
    torch.testing.assert_close(ours, loss.detach())
    expected = poptorch.ctc_beam_search_decoder(y, args[2], beam_width=8, top_paths=2)
    assert_same(tuple(found), expected)


# Random starts


def starts(seed, calls=1):
    """Return the first points of two segments in 6 micro-batches of each call."""
    options = make_options(6, seed=seed).outputMode(OutputMode.All)
    model = poptorch.inferenceModel(
        Function(lambda x: poptorch.fps(x[0], [0, 50, 100], 0.02, random_start=True)), options
    )
    x = torch.randn(6, 100, 3)
    return [model(x) for _ in range(calls)]


def test_random_starts_follow_the_seed():
    (first, second), (again, _), (other, _) = starts(1, 2), starts(1, 2), starts(2, 2)
    assert torch.equal(first, again)
    assert not torch.equal(first, second) and not torch.equal(first, other)


def test_random_starts_are_new_in_each_micro_batch_and_within_their_segment():
    rows = torch.cat([call.reshape(6, 2) for call in starts(1, 20)])
    assert ((rows[:, 0] < 50) & (rows[:, 1] >= 50) & (rows[:, 1] < 100)).all()
    for column in rows.T:
        assert len(column.unique()) > 30  # of 50, drawn 120 times


def test_all_other_points_follow_from_the_start():
    function = lambda x: poptorch.fps(x, [0, 20, 40], 0.5, random_start=True)  # noqa: E731
    x = torch.randn(40, 3)
    rows = infer(function, x, options=make_options(seed=3))
    for first, segment in ((0, rows[:10]), (20, rows[10:])):
        start = int(segment[0]) - first
        turned = x[first : first + 20].clone()
        turned[[0, start]] = turned[[start, 0]]
        order = list(range(first, first + 20))
        order[0], order[start] = order[start], order[0]
        assert segment.tolist() == [order[row] for row in poptorch.fps(turned, [0, 20], 0.5)]


@pytest.mark.parametrize("mode", [Recomputation.NONE, Recomputation.PIPELINE, Recomputation.ALL])
def test_recomputation_draws_the_same(mode):
    class Sampled(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(1)
            self.first, self.last = nn.Linear(3, 5), nn.Linear(5, 2)

        def forward(self, x):
            with poptorch.Block("a", ipu_id=0):
                rows = poptorch.fps(x[0], [0, 10, 30], 0.3, random_start=True)
                y = torch.tanh(self.first(x[0])).square()[rows]
            with poptorch.Block("b", ipu_id=1):
                y = self.last(y)
                return rows, y, poptorch.identity_loss(y.square(), "mean")

    options = make_options(2, 4, seed=5).outputMode(OutputMode.All)
    options._Popart.set("autoRecomputation", int(mode))
    model = Sampled()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    x = torch.randn(8, 30, 3, generator=torch.Generator().manual_seed(2))
    rows, _, losses = training(x)
    training.copyWeightsToHost()
    assert any("Fps:0__re" in name for name in training.getTensorNames()) == (mode > 0)

    twin = Sampled()
    for update in range(2):
        twin.zero_grad()
        for i in range(4 * update, 4 * update + 4):
            chosen = rows.reshape(8, -1)[i].long()
            y = twin.last(torch.tanh(twin.first(x[i])).square()[chosen])
            loss = y.square().mean()
            torch.testing.assert_close(losses[i], loss.detach())
            (loss / 4).backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter -= 0.1 * parameter.grad
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


# What surrounds a model


def every(x, scores, lengths):
    """Call all three."""
    with poptorch.NameScope("cloud"):
        some = poptorch.fps(x, SEGMENTS)
        rows = poptorch.nearest(x, x[some])
    return rows, poptorch.ctc_beam_search_decoder(scores, lengths, top_paths=2)


def inputs():
    return torch.randn(12, 3), torch.randn(7, 2, 4).log_softmax(2), torch.tensor([7, 5])


def test_names_and_anchors():
    options = quiet_options()
    options.anchorTensor("some", "cloud/Fps:0")
    options.anchorTensor("lengths", "CtcBeamSearchDecoder:1")
    model = poptorch.inferenceModel(Function(every), options)
    args = inputs()
    rows, (_, lengths, _) = model(*args)
    names = model.getTensorNames()
    assert {"cloud/Fps:0", "cloud/Nearest:0"} <= set(names)
    assert {f"CtcBeamSearchDecoder:{i}" for i in range(3)} <= set(names)
    some = model.getAnchoredTensor("some")
    assert_same(some, poptorch.fps(args[0], SEGMENTS))
    assert_same(rows, poptorch.nearest(args[0], args[0][some.long()]))
    assert torch.equal(model.getAnchoredTensor("lengths"), lengths)


def test_a_print_shows_the_numbers(capfd):
    def function(x):
        return poptorch.ipu_print_tensor(poptorch.fps(x, [0, 4], 1.0), "rows")

    infer(function, torch.tensor([0.0, 1.0, 9.0, 4.0]))
    assert "rows: (0,2,3,1)" in capfd.readouterr().err


def test_files(tmp_path):
    model = poptorch.inferenceModel(Function(every), quiet_options())
    args = inputs()
    expected = model(*args)
    model.save(tmp_path / "model")
    assert_same(poptorch.load(str(tmp_path / "model"))(*args), expected)
    other = poptorch.inferenceModel(Function(every), quiet_options())
    other.loadExecutable(str(tmp_path / "model"))
    assert_same(other(*args), expected)


def test_synthetic_data():
    """Batches and lengths of zeros are what they may be."""

    def function(x, y, of_x, of_y, scores, lengths):
        return poptorch.nearest(x, y, of_x, of_y), *poptorch.ctc_beam_search_decoder(
            scores, lengths
        )

    options = quiet_options().enableSyntheticData(True)
    batch = torch.arange(3)
    args = (torch.randn(3, 2), torch.randn(3, 2), batch, batch, *inputs()[1:])
    rows, _, lengths, _ = infer(function, *args, options=options)
    assert rows.shape == (3,) and lengths.tolist() == [[0], [0]]


def test_half_results_are_rounded_at_random():
    scores = torch.randn(60, 8, 4).log_softmax(2).half()
    lengths = torch.full((8,), 60)
    options = make_options(seed=1)
    options.Precision.enableStochasticRounding(True)
    ours = infer(poptorch.ctc_beam_search_decoder, scores, lengths, options=options)
    exact = poptorch.ctc_beam_search_decoder(scores.float(), lengths)
    assert_same(ours[1:], exact[1:])
    nearest = exact[0].half()
    error = (ours[0].float() - exact[0]).abs()
    assert not torch.equal(ours[0], nearest)
    assert (error < 2 * torch.finfo(torch.half).eps * exact[0].abs()).all()


GOOD = (torch.randn(3, 2), torch.randn(3, 2), torch.tensor([0, 1, 1]), torch.tensor([0, 1, 1]))
WRONG_BATCHES = {
    "x": ([0, 2, 1], [0, 1, 2], "batch_x must ascend, but 1 follows 2 in row 2"),
    "y": ([0, 1, 2], [1, 0, 2], "batch_y must ascend, but 0 follows 1 in row 1"),
    "missing": ([0, 1, 3], [0, 1, 2], "row 2 of x has the batch number 3, which no row of y has"),
}


@pytest.mark.parametrize(("of_x", "of_y", "message"), WRONG_BATCHES.values(), ids=WRONG_BATCHES)
def test_wrong_batches_fail_the_run(of_x, of_y, message):
    """The next run is right again. On the host the same is said."""
    model = poptorch.inferenceModel(Function(poptorch.nearest), quiet_options())
    wrong = (*GOOD[:2], torch.tensor(of_x), torch.tensor(of_y))
    where = r"while running 'Nearest:0' \(nearest, .*test_searches\.py:\d+\): nearest: "
    with pytest.raises(poptorch.Error, match=where + message):
        model(*wrong)
    assert_same(model(*GOOD), poptorch.nearest(*GOOD))
    with pytest.raises(poptorch.Error, match=message):
        poptorch.nearest(*wrong)


@pytest.mark.parametrize("length", [-1, 8])
def test_wrong_lengths_fail_the_run(length):
    model = poptorch.inferenceModel(Function(poptorch.ctc_beam_search_decoder), quiet_options())
    _, scores, lengths = inputs()
    message = f"length {length} of item 1 is out of range: probs has 7 steps"
    with pytest.raises(poptorch.Error, match=r"while running 'CtcBeam.*: " + message):
        model(scores, torch.tensor([7, length]))
    assert_same(model(scores, lengths), poptorch.ctc_beam_search_decoder(scores, lengths))
    with pytest.raises(poptorch.Error, match=message):
        poptorch.ctc_beam_search_decoder(scores, torch.tensor([7, length]))
