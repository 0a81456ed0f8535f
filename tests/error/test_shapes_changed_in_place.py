"""Forward changes the shape of an input or a buffer in place."""

import pytest
import torch

import popsim_torch as poptorch

MISTAKES = {
    "unsqueeze_": lambda _, x: x.unsqueeze_(1) * 2,
    "transpose_": lambda _, x: x.transpose_(0, 1) * 2,
    "t_": lambda _, x: x.t_() * 2,
    "as_strided_": lambda _, x: x.as_strided_((4, 6), (1, 4)) * 2,
    "resize_": lambda _, x: x.resize_(4, 6) * 2,
    "resize_as_": lambda _, x: x.resize_as_(torch.zeros(4, 6)) * 2,
    "changed after it": lambda _, x: x.unsqueeze_(1).mul_(2),
    "unpad_sequence": lambda _, x: torch.nn.utils.rnn.unpad_sequence(x, torch.tensor([6] * 4))[0],
    "buffer": lambda self, x: x.sum() + self.offset.unsqueeze_(0),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_in_forward(refused, name):
    error = refused(MISTAKES[name], poptorch.Error, "changes the shape of")
    assert "make another tensor" in str(error)
    assert "test_shapes_changed_in_place.py:" in str(error)
    assert ("'offset'" if name == "buffer" else "'x'") in str(error)


def test_in_the_body_of_a_loop(refused):
    def mistake(_, x):
        return poptorch.for_loop(2, lambda y: [y.unsqueeze_(0).sum(0) + 1], [x])[0]

    error = refused(mistake, poptorch.Error, "changes the shape of 'argument 0'")
    assert "test_shapes_changed_in_place.py:" in str(error)


@pytest.mark.parametrize("with_gradients", [True, False])
@pytest.mark.parametrize("tensor", ["parameter", "result"])
def test_of_what_a_body_reads(refused, tensor, with_gradients):
    def mistake(self, x):
        read = 2 * x if tensor == "result" else self.offset
        with torch.set_grad_enabled(with_gradients):
            return poptorch.for_loop(2, lambda y: [y + read.unsqueeze_(0).sum()], [x])[0]

    message = r"changes the shape of a tensor from outside of the body in place \(unsqueeze_\)"
    error = refused(mistake, poptorch.Error, message)
    assert "test_shapes_changed_in_place.py:" in str(error)


def changed_and_changed_back_in_a_body(x):
    y = 2 * x

    def body(z):
        y.unsqueeze_(1)
        y.squeeze_(1)
        return [z + y]

    return poptorch.for_loop(1, body, [x])[0]


def changed_and_changed_back(x):
    x.unsqueeze_(1).mul_(2)
    return x.squeeze_(1) + 1


def data_assigned(x):
    x.data = x.data.t()
    return x + torch.ones(3, 2)


ALLOWED = {
    "a copy": lambda x: x.clone().unsqueeze_(1) + 1,
    "a view": lambda x: x[0].unsqueeze_(1) + 1,
    "a result": lambda x: (2 * x).t_().unsqueeze_(0),
    "unpad_sequence of a result": lambda x: torch.nn.utils.rnn.unpad_sequence(
        2 * x, torch.tensor([1, 2, 2])
    )[1],
    "changed back": changed_and_changed_back,
    "changed back in a body": changed_and_changed_back_in_a_body,
    "data": data_assigned,
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed(h, name):
    function = ALLOWED[name]
    x = torch.rand(2, 3)
    ours, eager = x.clone(), x.clone()
    model = poptorch.inferenceModel(h.Net(lambda _, x: function(x)), h.make_options())
    torch.testing.assert_close(model(ours), function(eager))
    if name != "data":
        torch.testing.assert_close(ours, eager)
