"""On the host the layers are identities; mistakes in their arguments are errors."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from popsim_torch.errors import UsageTypeError
from popsim_torch.feeds import OutfeedQueue
from popsim_torch.observe import MaybeOutfeed, MaybeOutfeedQueue, Outfeed


def test_on_the_host_they_hand_on_what_they_are_given():
    model = nn.Sequential(Outfeed(OutfeedQueue(), "a"), MaybeOutfeed(MaybeOutfeedQueue(), name="b"))
    x = torch.rand(2, 3)
    assert model(x) is x
    assert not model[1].queue.enqueued


def test_they_have_no_parameters_and_print_their_names():
    layers = [Outfeed(OutfeedQueue(), "a"), MaybeOutfeed(MaybeOutfeedQueue(), False, "b")]
    assert [repr(layer) for layer in layers] == [
        "Outfeed('a')",
        "MaybeOutfeed('b', final_outfeed=False)",
    ]
    assert list(nn.ModuleList(layers).state_dict()) == []


def test_names_that_nobody_gave():
    assert Outfeed(OutfeedQueue()).name == "outfeed"
    assert MaybeOutfeed(MaybeOutfeedQueue()).name == "maybe_outfeed"
    queue = MaybeOutfeedQueue()
    layers = [
        MaybeOutfeed(queue),
        MaybeOutfeed(queue, name="maybe_outfeed_1"),
        MaybeOutfeed(queue),
        MaybeOutfeed(queue),
    ]
    assert [layer.name for layer in layers] == [
        "maybe_outfeed",
        *(f"maybe_outfeed_{number}" for number in (1, 2, 3)),
    ]


def test_two_layers_without_names_are_two():
    queue = MaybeOutfeedQueue()
    model = nn.Sequential(
        MaybeOutfeed(queue, final_outfeed=False), nn.ReLU(), MaybeOutfeed(copy.deepcopy(queue))
    )
    x = torch.tensor([[-1.0, 2.0]])
    for _ in range(2):  # (a second model of the same layers has the same keys)
        poptorch.inferenceModel(copy.deepcopy(model))(x)
        found = queue.dequeue()
        assert {key: value[0].tolist() for key, value in found.items()} == {
            "maybe_outfeed": [[-1.0, 2.0]],
            "maybe_outfeed_1": [[0.0, 2.0]],
        }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Outfeed(MaybeOutfeedQueue(), "a"), "MaybeOutfeed takes it"),
        (lambda: MaybeOutfeed(OutfeedQueue(), name="a"), "Outfeed takes it"),
        (lambda: Outfeed("a"), "got a str"),
        (lambda: MaybeOutfeed(MaybeOutfeedQueue(), "a"), "final_outfeed has to be True or False"),
        (lambda: Outfeed(OutfeedQueue(), 3), "the name has to be a string, got 3"),
    ],
)
def test_mistakes_are_told(make, message):
    with pytest.raises(UsageTypeError, match=message):
        make()
