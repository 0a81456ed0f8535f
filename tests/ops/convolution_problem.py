"""A convolution of images with their channels last, with its gradients, beside eager PyTorch's."""

import torch

from tests.ops.images import convolution_attributes, run_image_op, with_channels_last

CONVOLUTIONS = {
    1: torch.nn.functional.conv1d,
    2: torch.nn.functional.conv2d,
    3: torch.nn.functional.conv3d,
}


class ConvolutionProblem:
    """A convolution's operands, and what its passes compute from them.

    Args:
        case: Shapes of the image and the weight, stride, padding, dilation.
        dtype: Of all of them.
        attributes: Further ones of the ops.
    """

    def __init__(self, case, dtype=torch.float32, **attributes):
        x_shape, weight_shape, *geometry = case
        rank = len(x_shape) - 2
        geometry = [[v] * rank if isinstance(v, int) else list(v) for v in geometry]
        self.convolve = lambda x, w, b: CONVOLUTIONS[rank](x, w, b, *geometry)
        self.x = with_channels_last(torch.randn(x_shape).to(dtype))
        self.weight = torch.randn(weight_shape).to(dtype)
        self.bias = torch.randn(weight_shape[0]).to(dtype)
        shape = self.convolve(*(v.to("meta") for v in self.operands)).shape
        self.grad_y = with_channels_last(torch.randn(shape).to(dtype))
        self.attributes = convolution_attributes(*geometry) | attributes

    @property
    def operands(self):
        return self.x, self.weight, self.bias

    def forward(self):
        return self._run("convolution", self.operands, [self.grad_y])[0]

    def grad_x(self):
        shape = {"input_shape": list(self.x.shape)}
        operands = [self.grad_y, self.weight]
        return self._run("convolution_grad_input", operands, [self.x], **shape)[0]

    def grad_weight(self):
        return self._run(
            "convolution_grad_weight",
            [self.grad_y, self.x],
            [self.weight],
            channels_last=False,
            weight_shape=list(self.weight.shape),
        )[0]

    def _run(self, kind, operands, results, channels_last=True, **attributes):
        outputs = [(v.dtype, v.shape) for v in results]
        attributes = self.attributes | attributes
        return run_image_op(kind, operands, outputs, attributes, channels_last=channels_last)

    def eager(self, dtype):
        """Return y and the gradients of x and weight, computed in `dtype`."""
        return self._results(*(v.to(dtype) for v in (*self.operands, self.grad_y)))

    def counts(self):
        """Return how many numbers are added up in each element of the results."""
        return self._results(*(torch.ones_like(v.float()) for v in (*self.operands, self.grad_y)))

    def _results(self, x, weight, bias, grad_y):
        leaves = [v.requires_grad_() for v in (x, weight)]
        y = self.convolve(*leaves, bias)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]
