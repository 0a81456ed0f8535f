"""An operator in Python that shape rule and gradient are there for."""

import torch

import popsim_torch as poptorch
from popsim_torch.custom_ops.attributes import packed

DOMAIN, NAME = "popsim_tests", "Split"


@poptorch.register_custom_op(NAME, domain=DOMAIN)
def split(x, scale=1.0, signs=("below", "above")):
    """Return the numbers below zero and above zero, scaled."""
    return scale * x.clamp(max=0), scale * x.clamp(min=0)


@split.shapes
def _(x, scale=1.0, signs=("below", "above")):
    if len(signs) != 2 or not x.is_floating_point():
        raise ValueError("two signs, and numbers with a fraction")
    return torch.empty_like(x), torch.empty_like(x)


@split.gradient
def _(x, below, above, of_below, of_above, scale=1.0, signs=("below", "above")):
    return scale * torch.where(x < 0, of_below, of_above)


def attributes(**others):
    """Return the attributes of the op."""
    given = {"scale": 0.5, "signs": ["a", "b"]}
    return {"domain": DOMAIN, "name": NAME, "version": 1, **packed(given), **others}
