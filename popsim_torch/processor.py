"""What this installation computes with, for reports of bugs and slow runs."""

from __future__ import annotations

import platform
from dataclasses import dataclass

import torch

from popsim_torch import _native
from popsim_torch.version import RELEASE


@dataclass(frozen=True)
class BuildInfo:
    """What :func:`build_info` returns; ``print`` shows it in one line.

    Attributes:
        version: The version of popsim_torch.
        target: The instructions in use: ``sse4``, ``avx2``, ``avx512`` or ``amx``; ``baseline`` on
            processors other than x86-64. The environment variable ``POPSIM_CPU`` chooses a lower
            target than the highest.
        usable_targets: The targets that this processor and build have, from the lowest to the
            highest.
        onednn: Version of oneDNN; empty without oneDNN, when ATen computes convolutions.
        torch: Version of PyTorch.
        torch_capability: The instructions that PyTorch uses.
        python: Version of Python.
        num_threads: The number of threads that a run may use (``torch.set_num_threads``).
    """

    version: str
    target: str
    usable_targets: tuple[str, ...]
    onednn: str
    torch: str
    torch_capability: str
    python: str
    num_threads: int

    def __str__(self) -> str:
        """Return everything in one line."""
        return (
            f"popsim_torch {self.version}, target {self.target} of "
            f"{', '.join(self.usable_targets)}; oneDNN {self.onednn or 'none'}; "
            f"torch {self.torch} ({self.torch_capability}); Python {self.python}; "
            f"{self.num_threads} threads"
        )


def build_info() -> BuildInfo:
    """Return what this installation computes with."""
    return BuildInfo(
        version=RELEASE,
        target=_native.target(),
        usable_targets=tuple(_native.usable_targets()),
        onednn=_native.onednn_version(),
        torch=str(torch.__version__),
        torch_capability=torch.backends.cpu.get_cpu_capability(),
        python=platform.python_version(),
        num_threads=torch.get_num_threads(),
    )
