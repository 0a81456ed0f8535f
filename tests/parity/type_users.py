"""Code that asks for ``type(x)``, in another file than the model that calls it."""

import functools

import torch


def doubled(x):
    return x * 2 if type(x) is torch.Tensor else x * 3


class Doubler:
    def __call__(self, x):
        return doubled(x)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return doubled(x)

    @staticmethod
    def backward(ctx, gradient):
        return doubled(gradient)


def doubling(function):
    def wrapper(self, x):
        return doubled(function(self, x))

    return wrapper


def doubling_hook(module, args, result):
    return doubled(result)


partial = functools.partial(doubled)
functions = {"doubled": doubled}
doubler = Doubler()
