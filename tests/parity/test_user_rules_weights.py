"""Parametrizations and pruning: weights that are computed from other tensors."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.parity.user_rules import compare_training

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).t()

    def right_inverse(self, x):
        return x.triu()


class Skew(nn.Module):
    def forward(self, x):
        return x.triu(1) - x.triu(1).t()


class Cayley(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("id", torch.eye(4))

    def forward(self, x):
        return torch.linalg.solve(self.id + x, self.id - x)


class LowRank(nn.Module):
    """LoRA: the weight itself stays, a small product is trained."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.randn(2, 4) * 0.1)
        self.b = nn.Parameter(torch.zeros(4, 2))

    def forward(self, weight):
        return weight + self.b @ self.a


class Rounded(nn.Module):
    def forward(self, weight):
        return weight + ((weight * 8).round() / 8 - weight).detach()


class Positive(nn.Module):
    def forward(self, x):
        return nn.functional.softplus(x)

    def right_inverse(self, x):
        return x.abs().expm1().clamp(min=1e-3).log()


class TwoParts(nn.Module):
    def forward(self, direction, size):
        return direction / direction.norm() * size

    def right_inverse(self, weight):
        size = weight.norm()
        return weight / size, size


def low_rank(m):
    m.fc.weight.requires_grad_(False)
    parametrize.register_parametrization(m.fc, "weight", LowRank())


def chain(m):
    parametrize.register_parametrization(m.fc, "weight", Skew())
    parametrize.register_parametrization(m.fc, "weight", Cayley())


def both(m):
    parametrize.register_parametrization(m.fc, "weight", Symmetric())
    parametrize.register_parametrization(m.fc, "bias", Positive())


def of_a_buffer(m):
    parametrize.register_parametrization(m, "kept", Positive())


def removed(m):
    parametrize.register_parametrization(m.fc, "weight", Symmetric())
    parametrize.remove_parametrizations(m.fc, "weight")


def removed_unchanged(m):
    parametrize.register_parametrization(m.fc, "weight", Symmetric())
    parametrize.remove_parametrizations(m.fc, "weight", leave_parametrized=False)


def convolution(norm):
    def prepare(m):
        m.conv = norm(nn.Conv1d(2, 3, 3, padding=1))

    return prepare, lambda m, x: m.conv(m.fc(x).reshape(5, 2, 2))


def cached(m, x):
    with parametrize.cached():
        return m.fc(m.fc(x))


def plain(m, x):
    return m.last(m.fc(x).tanh())


def registered(module):
    return lambda m: parametrize.register_parametrization(m.fc, "weight", module)


PARAMETRIZATIONS = {
    "symmetric": (registered(Symmetric()), plain),
    "chain": (chain, plain),
    "weight and bias": (both, plain),
    "low rank": (low_rank, plain),
    "rounded": (registered(Rounded()), plain),
    "two parts": (registered(TwoParts()), plain),
    "of a buffer": (of_a_buffer, lambda m, x: m.fc(x) * m.kept),
    "cached": (registered(Symmetric()), cached),
    "removed": (removed, plain),
    "removed, unchanged": (removed_unchanged, plain),
    "orthogonal": (lambda m: parametrizations.orthogonal(m.fc), plain),
    "orthogonal by matrix_exp": (
        lambda m: parametrizations.orthogonal(m.fc, orthogonal_map="matrix_exp"),
        plain,
    ),
    "orthogonal by cayley": (
        lambda m: parametrizations.orthogonal(m.fc, orthogonal_map="cayley"),
        plain,
    ),
    "orthogonal by householder": (
        lambda m: parametrizations.orthogonal(m.last, orthogonal_map="householder"),
        plain,
    ),
    "orthogonal without a base": (
        lambda m: parametrizations.orthogonal(m.fc, use_trivialization=False),
        plain,
    ),
    "spectral_norm": (lambda m: parametrizations.spectral_norm(m.fc), plain),
    "spectral_norm of 3 iterations": (
        lambda m: parametrizations.spectral_norm(m.last, n_power_iterations=3),
        plain,
    ),
    "spectral_norm of a convolution": convolution(parametrizations.spectral_norm),
    "spectral_norm twice in a forward": (
        lambda m: parametrizations.spectral_norm(m.fc),
        lambda m, x: m.fc(m.fc(x).tanh()),
    ),
    "old spectral_norm": (lambda m: nn.utils.spectral_norm(m.fc), plain),
    "old spectral_norm of a convolution": convolution(nn.utils.spectral_norm),
    "old spectral_norm of dimension 1": (lambda m: nn.utils.spectral_norm(m.fc, dim=1), plain),
    "weight_norm": (lambda m: parametrizations.weight_norm(m.fc), plain),
    "weight_norm of all": (lambda m: parametrizations.weight_norm(m.fc, dim=None), plain),
    "weight_norm of a convolution": convolution(parametrizations.weight_norm),
    "old weight_norm": (lambda m: nn.utils.weight_norm(m.fc), plain),
    "old weight_norm of dimension 1": (lambda m: nn.utils.weight_norm(m.fc, dim=1), plain),
    "old weight_norm of a convolution": convolution(nn.utils.weight_norm),
}


def globally(m):
    prune.global_unstructured(
        [(m.fc, "weight"), (m.last, "weight")], prune.L1Unstructured, amount=0.4
    )


def twice(m):
    prune.l1_unstructured(m.fc, "weight", 0.3)
    prune.ln_structured(m.fc, "weight", 0.25, n=2, dim=0)


def made_permanent(m):
    prune.l1_unstructured(m.fc, "weight", 0.3)
    prune.remove(m.fc, "weight")


def custom_mask(m):
    prune.custom_from_mask(m.fc, "weight", torch.eye(4))


def by_threshold(m):
    class Threshold(prune.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t, default_mask):
            return default_mask * (t.abs() > 0.1)

    Threshold.apply(m.fc, "weight")


def mask_in_forward(m, x):
    """The mask is made again in every step."""
    weight = m.fc.weight
    mask = (weight.abs() > weight.abs().mean()).float()
    return nn.functional.linear(x, weight * mask, m.fc.bias)


PRUNING = {
    "l1_unstructured": (lambda m: prune.l1_unstructured(m.fc, "weight", 0.5), plain),
    "random_unstructured": (lambda m: prune.random_unstructured(m.fc, "weight", 0.5), plain),
    "ln_structured": (lambda m: prune.ln_structured(m.fc, "weight", 0.5, n=2, dim=1), plain),
    "of the bias": (lambda m: prune.l1_unstructured(m.fc, "bias", 2), plain),
    "custom_from_mask": (custom_mask, plain),
    "globally": (globally, plain),
    "twice": (twice, plain),
    "made permanent": (made_permanent, plain),
    "by threshold": (by_threshold, plain),
    "mask in forward": (None, mask_in_forward),
}
PROGRAMS = PARAMETRIZATIONS | PRUNING


@pytest.mark.parametrize(("prepare", "program"), PROGRAMS.values(), ids=PROGRAMS)
def test_it_trains_as_in_eager_pytorch(prepare, program):
    compare_training(program, prepare)
