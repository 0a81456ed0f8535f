"""``nn.TransformerEncoder`` with padding, in eval mode: eager PyTorch uses nested tensors."""

import copy

import pytest
import torch
from torch import nn

import popsim_torch as poptorch
from tests.options import make_options

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")

_END = [[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]]
_BEGIN = [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1]]
_NONE = [[0] * 5] * 3


def _float(values):
    return torch.zeros(3, 5).masked_fill(torch.tensor(values, dtype=torch.bool), -torch.inf)


MASKS = {
    "end": torch.tensor(_END, dtype=torch.bool),
    "begin": torch.tensor(_BEGIN, dtype=torch.bool),
    "none": torch.tensor(_NONE, dtype=torch.bool),
    "float": _float(_END),
    "float begin": _float(_BEGIN),
}


def _encoder(norm, **settings):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    norm = nn.LayerNorm(8, bias=True) if norm else None
    if norm is not None:
        nn.init.normal_(norm.bias)
    return nn.TransformerEncoder(layer, 2, norm, **settings).eval()


def _check(model, *args, **kwargs):
    with torch.no_grad():
        expected = model(*args, **kwargs)
    out = poptorch.inferenceModel(model, make_options())(*args, **kwargs)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name, norm):
    _check(_encoder(norm), torch.randn(3, 5, 8), src_key_padding_mask=MASKS[name])


def test_one_program_for_all_masks():
    encoder = _encoder(norm=True)
    model = poptorch.inferenceModel(encoder, make_options())
    for name in ("end", "begin", "none"):
        x = torch.randn(3, 5, 8)
        with torch.no_grad():
            expected = encoder(x, src_key_padding_mask=MASKS[name])
        out = model(x, src_key_padding_mask=MASKS[name])
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["end", "begin"])
def test_without_check_of_the_mask(name):
    encoder = _encoder(norm=False, mask_check=False)
    _check(encoder, torch.randn(3, 5, 8), src_key_padding_mask=MASKS[name])


@pytest.mark.parametrize("settings", [{"enable_nested_tensor": False}, {}])
def test_ordinary_path(settings):
    causal = nn.Transformer.generate_square_subsequent_mask(5) if not settings else None
    encoder = _encoder(norm=True, **settings)
    padding = MASKS["end"] if causal is None else MASKS["float"]
    _check(encoder, torch.randn(3, 5, 8), mask=causal, src_key_padding_mask=padding)


def test_inside_of_a_transformer():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 2, 1, 16, batch_first=True).eval()
    padding = MASKS["end"]
    x, y = torch.randn(3, 5, 8), torch.randn(3, 4, 8)
    _check(model, x, y, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    _check(model, x, y, src_key_padding_mask=padding)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = _encoder(norm=False)
        self.head = nn.Linear(8, 2)

    def forward(self, x, padding):
        y = self.head(self.encoder(x, src_key_padding_mask=padding))
        return y, poptorch.identity_loss((y * y).mean(), "none")


@pytest.mark.parametrize("frozen", [False, True])
def test_training_in_eval_mode(frozen):
    """Without trained layers, PyTorch leaves the padding out in training, too."""
    model = Classifier()
    model.encoder.requires_grad_(not frozen)
    eager = copy.deepcopy(model)
    x = torch.randn(3, 5, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    device = poptorch.trainingModel(model, make_options(), optimizer)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for _ in range(2):
        out, _ = device(x, MASKS["end"])
        optimizer.zero_grad()
        expected, loss = eager(x, MASKS["end"])
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_inference_after_training():
    model = Classifier()
    model.encoder.layers.requires_grad_(True)
    x = torch.randn(3, 5, 8)
    for layer in model.encoder.layers:
        layer.dropout.p = layer.dropout1.p = layer.dropout2.p = layer.self_attn.dropout = 0.0
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, make_options(), optimizer)
    training(x, MASKS["end"])
    training.detachFromDevice()
    model.eval()
    eager = Classifier().eval()  # (PyTorch uses no nested tensors for parameters of our class)
    eager.load_state_dict(model.state_dict())
    with torch.no_grad():
        expected, _ = eager(x, MASKS["end"])
    out, _ = poptorch.inferenceModel(model, make_options())(x, MASKS["end"])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_is_set_to():
    class Compared(nn.Module):
        def forward(self, x):
            y = x + 1
            same = [y.is_set_to(y.view(4)), y.is_set_to(y[1:]), y.is_set_to(x)]
            return y * torch.tensor(same, device=y.device).sum()

    model = poptorch.inferenceModel(Compared(), make_options())
    assert torch.equal(model(torch.ones(4)), torch.full((4,), 2.0))


def test_the_layer_of_a_failed_call_is_named():
    model = poptorch.inferenceModel(Classifier().eval(), make_options())
    with pytest.raises(Exception, match=r"encoder\.layers\.0"):
        model(torch.randn(3, 5, 7), MASKS["end"])
