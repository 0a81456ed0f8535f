"""How exact float32 sums of products are, of numbers drawn from a standard normal distribution."""

import math

import torch


def assert_as_exact_as_one_sum(
    actual: torch.Tensor, expected: torch.Tensor, counts: torch.Tensor | int, rounding: float
) -> None:
    """No library adds up less exactly than one product after the other does.

    oneDNN's kernels do just that, where eager PyTorch may have several sums, another layout or
    another library, and errors down to a third of it.

    Rounding a number to 24 bits is off by 0.42 * 2^-24 of it, as a root of the mean square: at most
    half a unit of the last place, which is constant between two powers of two. Partial sum i of
    these products has the size sqrt(i), and sqrt(1 + 2 + ... + n) is n / sqrt(2). So the error of a
    sum is 0.3 * 2^-24 * n. Single elements, with large partial sums, have 11 times that.

    How large partial sums are is chance: the variance of an error has itself a variance of 4/3 of
    its square, the fourth moment is 7 times that square, and so the size of the errors of N results
    is off by sqrt(6 / N) / 2.

    Args:
        actual: What was computed.
        expected: In float64.
        counts: Products in each sum.
        rounding: Of the result to its type, once: half a unit of the last place, as a share.
    """
    error = actual.double() - expected
    of_sums = 0.3 * 2**-24 * torch.as_tensor(counts).double().expand(expected.shape)
    wanted = math.hypot(_size(of_sums), 0.42 * rounding * _size(expected))
    chance = math.sqrt(6 / error.numel()) / 2
    assert _size(error) <= (1.05 + 3 * chance) * wanted
    assert (error.abs() <= 16 * of_sums + 1.01 * rounding * expected.abs().max()).all()


def _size(values: torch.Tensor) -> float:
    return values.square().mean().sqrt().item()
