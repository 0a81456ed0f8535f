"""Models with complex numbers, as users write them: each returns its output and its loss."""

import torch
from torch import nn
from torch.nn import functional as F

import popsim_torch as poptorch


class SpectralLoss(nn.Module):
    """A filter that is trained on the magnitudes of short-time spectra."""

    def __init__(self):
        super().__init__()
        self.filter = nn.Conv1d(1, 1, 9, padding=4)
        self.register_buffer("window", torch.hann_window(16))

    def spectrum(self, x):
        parts = torch.stft(x, 16, hop_length=4, window=self.window, return_complex=True)
        return parts.abs()

    def forward(self, x, target):
        y = self.filter(x[:, None])[:, 0]
        ours, wanted = self.spectrum(y), self.spectrum(target)
        converges = torch.linalg.norm(wanted - ours) / torch.linalg.norm(wanted)
        differs = F.l1_loss(torch.log(ours + 1e-2), torch.log(wanted + 1e-2))
        return y, poptorch.identity_loss(converges + differs, "none")

    @staticmethod
    def batch(n):
        return torch.randn(n, 64), torch.randn(n, 64)


class SpectralConv2d(nn.Module):
    """The layer of a Fourier neural operator: complex weights for the lowest frequencies."""

    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        shape = (width, width, modes, modes)
        self.low = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / width)
        self.high = nn.Parameter(torch.randn(shape, dtype=torch.cfloat) / width)

    def forward(self, x):
        m = self.modes
        found = torch.fft.rfft2(x)
        out = torch.zeros_like(found)
        out[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, :m, :m], self.low)
        out[:, :, -m:, :m] = torch.einsum("bixy,ioxy->boxy", found[:, :, -m:, :m], self.high)
        return torch.fft.irfft2(out, s=x.shape[-2:])


class NeuralOperator(nn.Module):
    def __init__(self, width=3, modes=2):
        super().__init__()
        self.lift = nn.Conv2d(1, width, 1)
        self.spectral = SpectralConv2d(width, modes)
        self.skip = nn.Conv2d(width, width, 1)
        self.project = nn.Conv2d(width, 1, 1)

    def forward(self, x, target):
        x = self.lift(x)
        x = F.gelu(self.spectral(x) + self.skip(x))
        y = self.project(x)
        return y, F.mse_loss(y, target)

    @staticmethod
    def batch(n):
        return torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8)


def rotations(width, length):
    """The angles of rotary embeddings, as numbers on the unit circle."""
    frequencies = 1.0 / 10000 ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


class RotaryAttention(nn.Module):
    def __init__(self, width=8, heads=2, length=6):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("rotations", rotations(width // heads, length))

    def rotated(self, x):
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.rotations).flatten(-2).type_as(x)

    def forward(self, x, target):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        y = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
        y = self.out(y.transpose(1, 2).flatten(-2))
        return y, F.mse_loss(y, target)

    @staticmethod
    def batch(n):
        return torch.randn(n, 6, 8), torch.randn(n, 6, 8)


class DiagonalSSM(nn.Module):
    """A state space with complex diagonal dynamics, as the convolution with its kernel."""

    def __init__(self, width=3, states=4):
        super().__init__()
        self.log_step = nn.Parameter(torch.rand(width) - 3)
        self.log_decay = nn.Parameter(torch.full((width, states), 0.5).log())
        self.frequency = nn.Parameter(torch.pi * torch.arange(states).float().repeat(width, 1))
        self.c = nn.Parameter(torch.randn(width, states, dtype=torch.cfloat) * 0.5**0.5)
        self.d = nn.Parameter(torch.randn(width))

    def kernel(self, length):
        a = torch.complex(-self.log_decay.exp(), self.frequency)
        step = self.log_step.exp()
        scaled = a * step[:, None]
        c = self.c * (torch.exp(scaled) - 1.0) / a
        powers = torch.exp(scaled[..., None] * torch.arange(length, device=a.device))
        return 2 * torch.einsum("hn,hnl->hl", c, powers).real

    def forward(self, u, target):
        length = u.shape[-1]
        kernel = torch.fft.rfft(self.kernel(length), n=2 * length)
        y = torch.fft.irfft(kernel * torch.fft.rfft(u, n=2 * length), n=2 * length)[..., :length]
        y = y + u * self.d[:, None]
        return y, F.mse_loss(y, target)

    @staticmethod
    def batch(n):
        return torch.randn(n, 3, 12), torch.randn(n, 3, 12)


class ComplexLayers(nn.Module):
    """Complex all through: input, weights, a buffer that forward changes, and output."""

    def __init__(self, width=4):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(width, width, dtype=torch.cfloat) * 0.5)
        self.b1 = nn.Parameter(torch.randn(width, dtype=torch.cfloat) * 0.1)
        self.w2 = nn.Parameter(torch.randn(width, width, dtype=torch.cfloat) * 0.5)
        self.register_buffer("mean", torch.zeros(width, dtype=torch.cfloat))

    def forward(self, z, target):
        z = z @ self.w1 + self.b1
        self.mean.mul_(0.9).add_(0.1 * z.detach().mean(0))
        z = z * torch.sigmoid(z.abs() - 0.5) / (z.abs() + 0.1)
        y = z @ self.w2.conj().mT
        difference = y - target
        return y, poptorch.identity_loss((difference * difference.conj()).real, "mean")

    @staticmethod
    def batch(n):
        return torch.randn(n, 4, dtype=torch.cfloat), torch.randn(n, 4, dtype=torch.cfloat)


MODELS = {
    one.__name__: one
    for one in (SpectralLoss, NeuralOperator, RotaryAttention, DiagonalSSM, ComplexLayers)
}
