"""Arguments that forward does not take, or that are missing."""

import pytest

import popsim_torch as poptorch


@pytest.fixture
def model(h):
    return poptorch.inferenceModel(h.Net(), h.make_options())


def test_too_many(h, model):
    x, y = h.good_batch()
    with pytest.raises(AssertionError, match="Too many arguments: got 3"):
        model(x, y, x)
    h.check_inference(model)


def test_an_unknown_keyword(h, model):
    x, _ = h.good_batch()
    with pytest.raises(AssertionError, match=r"Unknown keyword labels: forward takes \(x, y=None"):
        model(x, labels=None)
    h.check_inference(model)


def test_given_twice(h, model):
    x, _ = h.good_batch()
    with pytest.raises(AssertionError, match="x was given twice"):
        model(x, x=x)
    h.check_inference(model)


def test_a_missing_one(h, model):
    with pytest.raises(poptorch.Error, match="Mandatory parameter x missing"):
        model()
    h.check_inference(model)


def test_the_same_checks_hold_on_later_calls(h, model):
    x, y = h.good_batch()
    model(x)
    for args, kwargs in (((x, None, x), {}), ((x,), {"labels": y}), ((), {})):
        with pytest.raises(poptorch.Error):
            model(*args, **kwargs)
    h.check_inference(model)
