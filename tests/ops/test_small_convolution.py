"""Convolutions of few positions, which are computed as products of patches with the weight."""

import pytest
import torch

from tests.ops.convolution_problem import ConvolutionProblem
from tests.ops.num_threads import threads

# Shapes of x and weight, stride, padding, dilation.
CASES = {
    "points": ((4, 512, 4, 4), (256, 512, 1, 1), 1, 0, 1),
    "patches": ((4, 128, 2, 2), (1024, 128, 3, 3), 1, 1, 1),
    "strided": ((2, 100, 8, 8), (256, 100, 3, 3), 2, 1, 1),
    "dilated": ((1, 40, 5, 5), (256, 40, 3, 3), 1, 2, 2),
    "volumes": ((1, 24, 2, 4, 4), (512, 24, 3, 3, 3), (1, 2, 2), 1, 1),
}


def passes(problem: ConvolutionProblem) -> list[torch.Tensor]:
    return [problem.forward(), problem.grad_x(), problem.grad_weight()]


@pytest.mark.parametrize("name", CASES)
def test_all_passes_are_those_of_float64(name):
    torch.manual_seed(0)
    problem = ConvolutionProblem(CASES[name])
    x, weight = (v.double().requires_grad_() for v in (problem.x, problem.weight))
    y = problem.convolve(x, weight, problem.bias.double())
    gradients = torch.autograd.grad(y, (x, weight), problem.grad_y.double())
    for actual, expected in zip(passes(problem), (y.detach(), *gradients), strict=True):
        error = (actual.double() - expected).abs().max() / expected.abs().max()
        assert error < 1e-5


@pytest.mark.parametrize("name", ["points", "patches", "strided"])
def test_bits_do_not_depend_on_the_number_of_threads(name):
    torch.manual_seed(0)
    problem = ConvolutionProblem(CASES[name])
    with threads(1):
        alone = passes(problem)
    with threads(2):
        together = passes(problem)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))
