"""Products with half partials, slowly: what ``csrc/dense/vector/panels.h`` promises, in torch.

A pass of up to 16 products is summed in float32, in its order; the running sum starts with zero and
is rounded to float16 after each pass.
"""

import itertools

import torch

PASS = 16


class RunningSum:
    """A running sum of float16 numbers, kept as float32."""

    def __init__(self, shape) -> None:
        self.value = torch.zeros(shape)

    def add_pass(self, terms, where=...) -> None:
        """Add the sum of some float32 terms, in their order, to a part of it."""
        total = torch.zeros_like(self.value[where])
        for term in terms:
            total = total + term
        self.value[where] = (self.value[where] + total).half().float()


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return ``a @ b`` for (batches of) matrices."""
    a, b = a.float(), b.float()
    result = RunningSum(
        (*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
    )
    depth = a.shape[-1]
    for first in range(0, depth, PASS):
        terms = (
            a[..., :, k : k + 1] * b[..., k : k + 1, :]
            for k in range(first, min(first + PASS, depth))
        )
        result.add_pass(terms)
    return result.value.half()


class Convolution:
    """A convolution and its gradients; a value per spatial axis in each list."""

    def __init__(self, stride, padding, dilation, groups=1) -> None:
        self.stride, self.padding, self.dilation = stride, padding, dilation
        self.groups = groups

    def _window(self, position, sizes):
        """Return the part of a padded image that one element of the kernel is multiplied with."""
        return tuple(
            slice(p * d, p * d + s * (n - 1) + 1, s)
            for p, d, s, n in zip(position, self.dilation, self.stride, sizes, strict=True)
        )

    def _padded(self, x):
        pads = [pad for size in reversed(self.padding) for pad in (size, size)]
        return torch.nn.functional.pad(x, pads)

    def _inside(self, x, sizes):
        slices = (slice(p, p + n) for p, n in zip(self.padding, sizes, strict=True))
        return x[(..., *slices)]

    def _grouped(self, x, weight):
        """Return channels by group, and the weight as [group, out, in, kernel...]."""
        shape = (self.groups, weight.shape[0] // self.groups, *weight.shape[1:])
        return weight.float().reshape(shape)

    def _positions(self, weight):
        return itertools.product(*map(range, weight.shape[2:]))

    def forward(self, x, weight, sizes):
        """Return the output, of these spatial sizes."""
        grouped = self._grouped(x, weight)
        groups, out, channels = grouped.shape[:3]
        padded = self._padded(x.float())
        padded = padded.reshape(x.shape[0], groups, 1, channels, *padded.shape[2:])
        result = RunningSum((x.shape[0], groups, out, *sizes))
        for first in range(0, channels, PASS):
            for position in self._positions(weight):
                window = (..., *self._window(position, sizes))
                kernel = grouped[(..., *position)]
                terms = (
                    padded[:, :, :, c][window] * self._spread(kernel[:, :, c], len(sizes))
                    for c in range(first, min(first + PASS, channels))
                )
                result.add_pass(terms)
        return result.value.reshape(x.shape[0], groups * out, *sizes).half()

    def grad_input(self, grad, weight, sizes):
        """Return the gradient of an input of these spatial sizes."""
        grouped = self._grouped(grad, weight)
        groups, out, channels = grouped.shape[:3]
        gradient = grad.float().reshape(grad.shape[0], groups, out, 1, *grad.shape[2:])
        # Room for every window, those of positions that no output uses included.
        room = [
            max(n + 2 * p, d * (k - 1) + s * (m - 1) + 1)
            for n, p, d, k, s, m in zip(
                sizes,
                self.padding,
                self.dilation,
                weight.shape[2:],
                self.stride,
                grad.shape[2:],
                strict=True,
            )
        ]
        result = RunningSum((grad.shape[0], groups, channels, *room))
        for first in range(0, out, PASS):
            for position in self._positions(weight):
                kernel = grouped[(..., *position)]
                terms = (
                    gradient[:, :, o] * self._spread(kernel[:, o], len(sizes))
                    for o in range(first, min(first + PASS, out))
                )
                result.add_pass(terms, (..., *self._window(position, grad.shape[2:])))
        inside = self._inside(result.value, sizes)
        return inside.reshape(grad.shape[0], groups * channels, *sizes).half()

    def grad_weight(self, grad, x, shape):
        """Return the gradient of a weight of this shape."""
        padded = self._padded(x)
        rows = grad.transpose(0, 1).reshape(self.groups, shape[0] // self.groups, -1)
        result = torch.empty(self.groups, shape[0] // self.groups, *shape[1:], dtype=grad.dtype)
        for position in itertools.product(*map(range, shape[2:])):
            window = padded[(..., *self._window(position, grad.shape[2:]))]
            columns = window.transpose(0, 1).reshape(self.groups, shape[1], -1)
            result[(..., *position)] = product(rows, columns.mT)
        return result.reshape(shape)

    @staticmethod
    def _spread(values, num_axes):
        return values.reshape(*values.shape, *[1] * num_axes)
