"""Operations that the device does not have."""

import pytest
import torch

import popsim_torch as poptorch

# PyTorch's own, for complex numbers of half precision.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


@pytest.mark.parametrize(
    "mistake",
    [
        lambda _, x: torch.complex(x.half(), x.half()).abs(),
        lambda _, x: torch.view_as_complex(x.half().view(-1, 2, 2)).real,
        lambda _, x: (x.half() * 1j).abs(),
        lambda _, x: x.to_sparse().to_dense(),
    ],
    ids=["complex", "view_as_complex", "complex number", "sparse"],
)
def test_refused_at_compile_time(h, mistake):
    net = h.Net(mistake)
    model = poptorch.inferenceModel(net, h.make_options())
    with pytest.raises(poptorch.Error, match="Unsupported"):
        model.compile(h.good_batch()[0])
    assert not model.isCompiled()
    net.switch["on"] = False
    h.check_inference(model)


def test_all_of_them_are_named(h):
    def mistake(_, x):
        x = x.half()
        return torch.complex(x, x).real + torch.view_as_complex(x.view(-1, 2, 2)).imag.sum()

    model = poptorch.inferenceModel(h.Net(mistake), h.make_options())
    names = r"\[aten::complex, aten::view_as_complex\]"
    with pytest.raises(poptorch.Error, match=names) as caught:
        model(h.good_batch()[0])
    assert f"{__file__}:" in str(caught.value)


@pytest.mark.parametrize("is_buffer", [False, True])
def test_sparse_attributes(h, is_buffer):
    def mistake(net, x):
        return torch.sparse.mm(net.adjacency, x)

    net = h.Net(mistake)
    adjacency = torch.eye(6).to_sparse()
    if is_buffer:
        net.register_buffer("adjacency", adjacency)
    else:
        net.adjacency = adjacency
    model = poptorch.inferenceModel(net, h.make_options())
    with pytest.raises(poptorch.Error, match=r"of layout torch.sparse_coo.*to_dense\(\)") as caught:
        model(h.good_batch()[0])
    assert f"{__file__}:" in str(caught.value)
    assert not is_buffer or "'adjacency'" in str(caught.value)
    net.switch["on"] = False  # (a sparse buffer that forward does not read does not matter)
    h.check_inference(model)


def test_backward_of_an_output(h):
    model = h.train(h.Net())
    _, loss = model(*h.good_batch())
    with pytest.raises((poptorch.Error, RuntimeError)):
        loss.backward()
    h.check_training(model)
