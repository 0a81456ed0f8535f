"""Modules that forward converts: to the dtype that they have, or modules that it makes."""

import threading

import torch
from torch import nn

from tests.parity.functions import compare_with_eager, in_both


def filled(module):
    for number, parameter in enumerate(module.parameters()):
        nn.init.constant_(parameter, 0.25 + number)
    return module


def halved(_, x):
    layer = filled(nn.Linear(4, 3))
    weight = layer.weight
    assert layer.half() is layer
    assert layer.weight is weight
    return layer(x.half())


CASTS = {
    "float": lambda model, x: model.fc.float()(x),
    "the whole model": lambda model, x: model.float().fc(x),
    "to a dtype": lambda model, x: model.fc.to(x.dtype)(x),
    "to a tensor": lambda model, x: model.fc.to(x)(x),
    "to a device": lambda model, x: model.fc.to(x.device)(x),
    "to both": lambda model, x: model.fc.to(x.device, x.dtype)(x),
    "type": lambda model, x: model.fc.type(x.type())(x),
    "memory format": lambda model, x: model.fc.to(memory_format=torch.channels_last)(x),
    "made": halved,
    "made recurrent": lambda _, x: filled(nn.GRU(4, 3)).to(x.device).float()(x)[0],
    "skip_init": lambda _, x: filled(nn.utils.skip_init(nn.Linear, 4, 3))(x),
    "skip_init on a device": lambda _, x: filled(
        nn.utils.skip_init(nn.Linear, 4, 3, device=x.device)
    )(x),
}


@in_both(CASTS)
def test_like_eager(function, kind):
    compare_with_eager(function, kind)


def test_a_module_of_the_host():
    layers = [filled(nn.Linear(4, 3))]
    compare_with_eager(lambda _, x: layers[0].float()(x), "inference")
    compare_with_eager(lambda _, x: layers[0].to(x.device)(x), "inference")
    compare_with_eager(lambda _, x: layers[0].half()(x.half()), "inference")
    assert type(layers[0].weight.data) is torch.Tensor
    assert layers[0].weight.dtype == torch.float16


def test_other_threads_convert_modules_as_usual():
    layer = nn.Linear(4, 3)
    layer.weight.grad = torch.ones(3, 4)

    def forward(_, x):
        thread = threading.Thread(target=layer.double)
        thread.start()
        thread.join()
        return x

    compare_with_eager(forward, "inference")
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float64
