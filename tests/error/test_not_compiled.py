"""Use a function that needs a compiled model, before the model is compiled."""

import pytest

import popsim_torch as poptorch

NEEDS_A_PROGRAM = {
    "copyWeightsToHost": lambda model: model.copyWeightsToHost(),
    "copyWeightsToDevice": lambda model: model.copyWeightsToDevice(),
    "rng_state": lambda model: model.rng_state,
    "set rng_state": lambda model: setattr(model, "rng_state", [1, 2]),
}


@pytest.fixture(params=["training", "inference"])
def model(request, h):
    if request.param == "training":
        return h.train(h.Net())
    return poptorch.inferenceModel(h.Net(), h.make_options())


def check(h, model):
    (h.check_training if model.training_mode else h.check_inference)(model)


def test_get_tensor_names(h, model):
    with pytest.raises(AssertionError, match="getTensorNames: the model is not compiled") as caught:
        model.getTensorNames()
    assert isinstance(caught.value, poptorch.Error)
    check(h, model)
    assert "fc.weight" in model.getTensorNames()


@pytest.mark.parametrize("use", NEEDS_A_PROGRAM.values(), ids=NEEDS_A_PROGRAM)
def test_members_that_need_a_program(h, model, use):
    with pytest.raises(poptorch.Error, match="not been compiled or has been destroyed"):
        use(model)
    check(h, model)
    use(model)


@pytest.mark.parametrize("use", NEEDS_A_PROGRAM.values(), ids=NEEDS_A_PROGRAM)
def test_members_that_need_a_program_after_destroy(h, model, use):
    model.compile(*h.good_batch()[: 2 if model.training_mode else 1])
    model.destroy()
    with pytest.raises(poptorch.Error, match="not been compiled or has been destroyed"):
        use(model)
    check(h, model)


def test_destroy_and_copies_if_needed_do_nothing(h, model):
    model.destroy()
    assert model.copyWeightsToHostIfNeeded() is False
    assert not model.isCompiled()
    assert not model.isAttachedToDevice()
    check(h, model)
