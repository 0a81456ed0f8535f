"""The shapes of elements that the documents work out as examples."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch


@pytest.mark.parametrize(
    ("mode", "iterations", "axis"),
    [
        (poptorch.OutfeedMode.ALL, 20, (20,)),
        (poptorch.OutfeedMode.ALL, 40, (40,)),
        (poptorch.OutfeedMode.LAST, 20, ()),
    ],
)
def test_the_worked_shapes_of_elements(mode, iterations, axis):
    """A tensor, a tuple and a dictionary; one replica has no axis of its own."""
    tensor, pair, named = (poptorch.OutfeedQueue(mode) for _ in range(3))

    @poptorch.function
    def run():
        def body(x, y):
            tensor.enqueue(x)
            pair.enqueue((x, y))
            named.enqueue({"x": x, "y": y})
            return x + 1, y

        poptorch.repeat(iterations, body, (torch.ones(4, 4), torch.ones(1)))

    run()
    assert tensor.dequeue().shape == (*axis, 4, 4)
    assert [one.shape for one in pair.dequeue()] == [(*axis, 4, 4), (*axis, 1)]
    shapes = {key: tuple(one.shape) for key, one in named.dequeue().items()}
    assert shapes == {"x": (*axis, 4, 4), "y": (*axis, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "steps"), [("BEFORE_APPLY", 100), ("AFTER_COMPUTE", 1600)])
def test_the_worked_shapes_in_full(mode, steps):
    """Two stages of 784-256-128-10, 16 micro-batches of 32 for each of 100 updates."""
    # The gradients of all weights, for each micro-batch, would be more than a gigabyte.
    filters = ["dense1", "dense2"] if steps == 100 else ["dense1.bias", "dense2.bias"]
    gradients, losses = poptorch.MaybeOutfeedQueue(filters=filters), poptorch.OutfeedQueue()
    first, second = poptorch.MaybeOutfeedQueue(filters=["dense1"]), poptorch.MaybeOutfeedQueue()
    dense1, dense2, dense3 = nn.Linear(784, 256), nn.Linear(256, 128), nn.Linear(128, 10)
    network = nn.ModuleDict({"dense1": dense1, "dense2": dense2, "dense3": dense3})
    sgd = torch.optim.SGD(network.parameters(), lr=0.01)
    optimizer = poptorch.OutfeedOptimizer(
        sgd, gradients, poptorch.OutfeedOptimizerMode[mode], model=network
    )

    def stage_1(x, y):
        x = F.relu(dense1(x))
        first.maybe_outfeed("dense1", x)
        x = F.relu(dense2(x))
        first.maybe_outfeed("dense2", x)
        first.maybe_enqueue()
        return x, y

    def stage_2(x, y):
        logits = dense3(x)
        second.maybe_outfeed("dense3", logits)
        second.maybe_enqueue()
        return F.cross_entropy(logits, y)

    batch = (torch.rand(32, 784), torch.randint(10, (32,)))
    with poptorch.InfeedQueue([batch], repeat=True) as infeed:

        @poptorch.function
        def run():
            poptorch.pipeline(
                [stage_1, stage_2],
                16,
                100,
                infeed_queue=infeed,
                outfeed_queue=losses,
                outfeed_loss=True,
                optimizer_function=lambda loss: (optimizer, loss),
            )

        run()

    def shapes(queue):
        return {key: tuple(value.shape) for key, value in queue.dequeue().items()}

    assert shapes(first) == {"dense1": (1600, 32, 256)}
    assert shapes(second) == {"dense3": (1600, 32, 10)}
    of_gradients = {
        "dense2.bias_grad": (steps, 128),
        "dense2.weight_grad": (steps, 128, 256),
        "dense1.bias_grad": (steps, 256),
        "dense1.weight_grad": (steps, 256, 784),
    }
    if steps == 1600:
        of_gradients = {key: shape for key, shape in of_gradients.items() if "bias" in key}
    assert shapes(gradients) == of_gradients
    assert losses.dequeue().shape == (1600,)
