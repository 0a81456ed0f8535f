"""Values that loops carry, read and return, against the same loop in Python."""

import pytest
import torch

import popsim_torch as poptorch


def looped(n, body, inputs=(), **settings):
    @poptorch.function
    def run():
        return poptorch.repeat(n, body, inputs, **settings)

    return run


def test_values_are_carried_from_iteration_to_iteration():
    run = looped(10, lambda i, total: (i + 1, total + i.float()), [torch.tensor(0), 0.0])
    for _ in range(2):  # each call begins anew
        count, total = run()
        assert (count.item(), total.item()) == (10, 45.0)
        assert (count.dtype, total.dtype) == (torch.int64, torch.float32)


def test_values_change_places_at_once():
    run = looped(3, lambda x, y: (y, x * 2), [torch.ones(3), torch.full((3,), 5.0)])
    x, y = run()
    assert x.tolist() == [10.0] * 3
    assert y.tolist() == [4.0] * 3


def test_a_value_may_be_changed_in_place():
    def body(x):
        x += 1
        return x

    assert looped(4, body, torch.zeros(2))().tolist() == [4.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.int32, torch.bool, torch.uint8])
def test_every_type_is_carried(dtype):
    value = torch.tensor([1, 0, 1]).to(dtype)
    result = looped(3, lambda x: x.flip(0), value)()
    assert result.dtype == dtype
    assert torch.equal(result, value.flip(0))


def test_no_iteration_leaves_the_values():
    assert looped(0, lambda x: x + 1, 2.5)().item() == 2.5


def test_arguments_differ_from_call_to_call():
    @poptorch.function
    def scaled(x, factor):
        return poptorch.repeat(3, lambda y: y * factor, x)

    for factor in (2.0, 3.0):
        result = scaled(torch.ones(2), torch.tensor(factor))
        assert result.tolist() == [factor**3] * 2
    assert len(scaled.programs) == 1


def test_other_shapes_and_other_plain_arguments_are_recorded_anew():
    @poptorch.function
    def grown(x, n):
        return poptorch.repeat(n, lambda y: y + 1, x)

    assert grown(torch.zeros(2), 3).tolist() == [3.0, 3.0]
    assert grown(torch.zeros(3), 3).tolist() == [3.0] * 3
    assert grown(torch.zeros(3), 4).tolist() == [4.0] * 3
    assert grown(torch.ones(2), 3).tolist() == [4.0, 4.0]
    assert len(grown.programs) == 3


def test_loops_follow_one_another():
    @poptorch.function
    def chained(x):
        first = poptorch.repeat(2, lambda y: y + 1, x)
        second = poptorch.repeat(2, lambda y: y * first, first)
        return {"first": first, "second": (second, "text")}

    for start in (1.0, 0.0):
        result = chained(torch.full((2,), start))
        first = start + 2
        assert result["first"].tolist() == [first] * 2
        assert result["second"][0].tolist() == [first**3] * 2
        assert result["second"][1] == "text"


def test_the_python_code_runs_once():
    calls = []

    @poptorch.function
    def run(x):
        calls.append("function")

        def body(y):
            calls.append("body")
            return y + 1

        return poptorch.repeat(5, body, x)

    for _ in range(3):
        assert run(torch.zeros(())).item() == 5.0
    assert calls == ["function", "body"]


def test_a_condition_ends_the_loop():
    @poptorch.function
    def doubled(x):
        return poptorch.while_loop(
            lambda y, _: y.sum() < 100, lambda y, i: (y * 2, i + 1), [x, torch.tensor(0)]
        )

    value, iterations = doubled(torch.ones(3))
    assert (value.tolist(), iterations.item()) == ([64.0] * 3, 6)
    value, iterations = doubled(torch.full((3,), 200.0))
    assert (value.tolist(), iterations.item()) == ([200.0] * 3, 0)


@pytest.mark.parametrize(("most", "expected"), [(0, 1.0), (1, 2.0), (5, 32.0)])
def test_a_while_loop_has_a_largest_number_of_iterations(most, expected):
    @poptorch.function
    def run():
        return poptorch.while_loop(lambda x: x > 0, lambda x: x * 2, 1.0, maximum_iterations=most)

    assert run().item() == expected


def test_an_infeed_is_not_shown_to_the_condition():
    infeed = poptorch.InfeedQueue([torch.tensor([float(i)]) for i in range(20)])

    @poptorch.function
    def run():
        return poptorch.while_loop(
            lambda total: total.sum() < 10, lambda total, x: total + x, torch.zeros(1), infeed
        )

    assert run().item() == 0 + 1 + 2 + 3 + 4
    assert run().item() == 5 + 6  # it goes on where it was
    infeed.deleter()


def test_elements_come_behind_the_carried_values():
    pairs = [(torch.full((2,), float(i)), torch.full((2,), 10.0)) for i in range(5)]

    def body(total, x, y):
        return total + x * y

    for infeed in (
        poptorch.InfeedQueue(pairs),
        poptorch.InfeedQueue([{"y": y, "x": x} for x, y in pairs]),
    ):
        result = looped(5, body, torch.zeros(2), infeed=infeed)()
        assert result.tolist() == [100.0, 100.0]
        infeed.deleter()


def test_random_numbers_differ_from_iteration_to_iteration():
    def run():
        outfeed = poptorch.OutfeedQueue()

        def body():
            outfeed.enqueue(torch.rand(4, device="ipu"))

        function = poptorch.function(
            lambda: poptorch.repeat(3, body), options=poptorch.Options().randomSeed(7)
        )
        function()
        first = outfeed.dequeue()
        function()
        return first, outfeed.dequeue()

    first, second = run()
    assert len({tuple(row.tolist()) for row in torch.cat([first, second])}) == 6
    again = run()
    assert torch.equal(first, again[0]) and torch.equal(second, again[1])


def test_the_trivial_program_of_the_guide():
    ones = torch.ones(800)
    infeed = poptorch.InfeedQueue(iter(lambda: (ones, ones), None))
    outfeed = poptorch.OutfeedQueue()

    @poptorch.function
    def net():
        def body(counter, x1, x2):
            outfeed.enqueue({"d1": x1 + x2, "d2": x1 - x2})
            return counter + 1

        return poptorch.repeat(10, body, torch.tensor(0), infeed)

    assert net().item() == 10
    result = outfeed.dequeue()
    assert torch.equal(result["d1"], torch.full((10, 800), 2.0))
    assert torch.equal(result["d2"], torch.zeros(10, 800))
    infeed.deleter()


def test_an_anchor_of_a_while_loop_is_of_its_body():
    options = poptorch.Options()
    options.anchorTensor("double", "Mul:0", output_mode=poptorch.OutputMode.Final)

    @poptorch.function(options=options)
    def run():
        return poptorch.while_loop(lambda x: x < 5, lambda x: x * 2, 1.0, maximum_iterations=9)

    assert run().item() == 8.0
    assert run.programs[0].getAnchoredTensor("double").item() == 8.0


def doubled(name, *mode):
    """Return a function that doubles a number until it is large, and its anchor."""
    options = poptorch.Options()
    options.anchorTensor("value", name, *mode)

    @poptorch.function(options=options)
    def run():
        def body(x):
            return (x * 2).reshape(1).sum()

        return poptorch.while_loop(lambda x: x < 100, body, 1.0, maximum_iterations=9)

    return run


@pytest.mark.parametrize(
    "mode",
    [(poptorch.OutputMode.All,), (poptorch.OutputMode.Sum,), (poptorch.OutputMode.EveryN, 2)],
    ids=lambda mode: mode[0].name,
)
def test_anchors_of_all_iterations_of_a_while_loop_are_refused(mode):
    message = (
        rf"anchorTensor\('value', 'Mul:0'\): "
        rf"the number of iterations of a while_loop .* for OutputMode\.{mode[0].name}\. "
        r"Enqueue the tensor in the body, to a poptorch\.OutfeedQueue; or carry it"
    )
    with pytest.raises(poptorch.Error, match=message):
        doubled("Mul:0", *mode)()


def test_an_anchor_of_a_while_loop_that_its_last_iteration_does_not_keep_is_refused():
    with pytest.raises(
        poptorch.Error, match=r"while_loop is not known in advance, so this tensor's value of"
    ):
        doubled("carried0", poptorch.OutputMode.Final)()


def test_a_period_that_is_longer_than_a_while_loop_goes_on_from_call_to_call():
    run = doubled("Mul:0", poptorch.OutputMode.EveryN, 10)
    run()  # seven iterations
    with pytest.raises(poptorch.Error, match="7 have run"):
        run.programs[0].getAnchoredTensor("value")
    run()
    assert run.programs[0].getAnchoredTensor("value").item() == 8.0
