"""How far results may be from eager PyTorch's, by element type: one table for all parity tests."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """What ``torch.testing.assert_close`` is given.

    Attributes:
        rtol: Relative to each expected element.
        of_largest: Relative to the largest expected element: what cancels in sums of such elements.
        atol: Absolute, for tensors that are zero but for rounding.
    """

    rtol: float
    of_largest: float
    atol: float

    def of(self, expected: torch.Tensor) -> dict[str, float]:
        """Return the arguments for a comparison with ``expected``."""
        values = expected.abs() if expected.is_complex() else expected
        values = values.double().flatten()
        finite = values[values.isfinite()]
        largest = float(finite.abs().max()) if finite.numel() else 0.0
        return {"rtol": self.rtol, "atol": self.atol + self.of_largest * largest}


# After ten updates of a model.
TRAINED = {
    torch.float32: Tolerance(rtol=1e-4, of_largest=1e-5, atol=1e-6),
    torch.float16: Tolerance(rtol=2e-2, of_largest=1e-2, atol=2e-4),
}
# One pass through a model or a graph.
ONE_PASS = {
    torch.float32: Tolerance(rtol=1e-4, of_largest=1e-6, atol=1e-6),
    torch.float16: Tolerance(rtol=2e-2, of_largest=5e-3, atol=1e-3),
}
# One operator; many of them are computed in another order here.
SWEEP = Tolerance(rtol=1e-4, of_largest=1e-5, atol=1e-5)
