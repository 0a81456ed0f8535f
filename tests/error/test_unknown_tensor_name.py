"""An anchor with a name that no tensor has."""

import pytest

import popsim_torch as poptorch


def compile_with_anchor(h, net, name):
    options = h.make_options()
    options.anchorTensor("it", name)
    return h.refuse_training(net, options, poptorch.Error, "no tensor named")


def test_the_text_names_the_setter_the_name_and_the_closest_ones(h):
    text = compile_with_anchor(h, h.Net(), "Gradient___fc.wieght")
    assert "Options.anchorTensor: no tensor named 'Gradient___fc.wieght' among the " in text
    assert "tensors of this graph" in text
    assert "'Gradient___fc.weight'" in text
    assert "Anchor tensor not in Ir Tensors" in text
    assert "getTensorNames()" in text


def test_the_number_of_tensors_is_that_of_the_names_listed(h):
    net = h.Net()
    text = compile_with_anchor(h, net, "nothing like this")
    model = h.train(net)
    model.compile(*h.good_batch())
    assert f"among the {len(model.getTensorNames())} tensors" in text


def test_a_gradient_that_does_not_exist_gets_a_hint(h):
    text = compile_with_anchor(h, h.Net(), "Gradient___offset")
    assert "depends on" in text


def test_a_name_that_resembles_nothing(h):
    text = compile_with_anchor(h, h.Net(), "&")
    assert "no tensor named '&'" in text
    assert "Closest" not in text
    assert "Some of them: '" in text


def test_a_name_that_resembles_several(h):
    text = compile_with_anchor(h, h.Net(), "fc.weights")
    listed = text[text.index("Closest names: ") :].split(". Compile")[0]
    assert "'fc.weight'" in listed
    assert 2 <= listed.count("', '") + 1 <= 5


def test_a_far_name_gets_names_with_the_same_words(h):
    text = compile_with_anchor(h, h.Net(), "the weight of fc")
    some = text[text.index("Some of them: ") :]
    assert "fc.weight'" in some


def test_a_name_of_training_in_inference(h):
    options = h.make_options()
    options.anchorTensor("it", "Gradient___fc.weight")
    model = poptorch.inferenceModel(h.Net(), options)
    with pytest.raises(poptorch.Error, match=r"no tensor named 'Gradient___fc\.weight'"):
        model(h.good_batch()[0])


def test_the_model_trains_with_other_options(h):
    net = h.Net()
    compile_with_anchor(h, net, "Gradient___fc.wieght")
    h.check_training(h.train(net))


def test_an_unknown_short_name(h):
    options = h.make_options()
    options.anchorTensor("weight", "fc.weight")
    model = h.train(h.Net(), options)
    model(*h.good_batch())
    with pytest.raises(AssertionError, match="No tensor with name 'wieght'") as caught:
        model.getAnchoredTensor("wieght")
    assert isinstance(caught.value, poptorch.Error)
    assert "Closest name: 'weight'" in str(caught.value)
    assert model.getAnchoredTensor("weight").shape == (3, 4)
