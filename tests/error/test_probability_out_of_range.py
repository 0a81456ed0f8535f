"""Random numbers with parameters that are invalid for the distribution.

If forward computes an invalid probability, the run fails, and the next run is correct; an invalid
Python number is refused when the model is compiled.
"""

import math

import pytest
import torch
from torch import nn

import popsim_torch as poptorch


class Draws(nn.Module):
    def forward(self, p):
        return torch.bernoulli(p)


# Several threads draw the numbers of the last size.
@pytest.mark.parametrize("size", [1, 7, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("bad", [1.5, -0.25, math.nan, math.inf])
def test_in_a_run(h, bad, dtype, size):
    model = poptorch.inferenceModel(Draws(), h.make_options())
    good = torch.arange(size) % 2
    wrong = good.to(dtype)
    wrong[-1] = bad
    for _ in range(2):
        match = r"while running '.*test_probability_out_of_range.py:\d+.*must be in \[0, 1\]"
        with pytest.raises(poptorch.Error, match=match):
            model(wrong)
        assert torch.equal(model(good.to(dtype)), good.to(dtype))


def test_in_training_nothing_is_updated(h):
    class Drops(h.Net):
        def forward(self, x, y, p):
            out = self.fc(x) * torch.bernoulli(p)
            return out, self.loss(out, y)

    net = Drops()
    model = h.train(net)
    x, y = h.good_batch()
    model(x, y, torch.ones(6, 3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with pytest.raises(poptorch.Error, match="a probability is 2"):
        model(x, y, torch.full((6, 3), 2.0))
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


@pytest.mark.parametrize(
    "draw, problem",
    [
        (lambda x: torch.bernoulli(x, 1.5), r"p is 1.5, it must be in \[0, 1\]"),
        (lambda x: x.clone().bernoulli_(math.nan), "p is nan"),
        (lambda x: x.clone().uniform_(2.0, 1.0), "from is 2.0, it must not be above to = 1.0"),
    ],
)
def test_a_number_in_forward(h, draw, problem):
    net = h.Net(lambda net, x: draw(x))
    model = poptorch.inferenceModel(net, h.make_options())
    x, _ = h.good_batch()
    with pytest.raises(poptorch.Error, match=rf"test_probability_out_of_range.py:\d+.*{problem}"):
        model(x)
    net.switch["on"] = False
    torch.testing.assert_close(model(x), net(x))


@pytest.mark.parametrize("name", ["dropout", "alpha_dropout", "dropout2d"])
def test_dropout_in_inference_has_a_probability(h, name):
    drop = getattr(nn.functional, name)
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1, but got"):
        drop(torch.ones(2, 3, 4, 5), 1.5)
    net = h.Net(lambda _, x: drop(x.view(*x.shape, 1, 1), p=1.5))
    model = poptorch.inferenceModel(net, h.make_options())
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1, but got"):
        model(h.good_batch()[0])
    net.switch["on"] = False
    h.check_inference(model)
