"""Custom operators in the style of PopTorch's guide: of a library, and those that are shipped."""

import ctypes
import sys

import poptorch
import torch

poptorch.setLogLevel("ERR")
ctypes.cdll.LoadLibrary(sys.argv[1])


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x, bias):
        x = self.layer(x)
        y = poptorch.custom_op(
            (x,), "Cube", "popsim_tests", 1, example_outputs=[x], attributes={"scale": 2.0}
        )
        out = y[0] + bias
        return out, poptorch.identity_loss(out, reduction="mean")


class Gather(torch.nn.Module):
    def forward(self, data, index):
        (out,) = poptorch.custom_op(
            [data, index],
            "FastGatherLastDim",
            "poptorch.custom_ops",
            1,
            example_outputs=[torch.zeros(index.shape, dtype=data.dtype)],
        )
        return out


class Unknown(torch.nn.Module):
    def forward(self, x):
        return poptorch.custom_op([x], "Cubed", "popsim_tests", 1, example_outputs=[x])[0]


class LeakyRelu(torch.nn.Module):
    def forward(self, x):
        return poptorch.custom_op(
            [x], "LeakyRelu", "ai.onnx", 9, example_outputs=[x], attributes={"alpha": 0.02}
        )[0]


network = Network()
x, bias = torch.randn(3, 4), torch.ones(4)
expected = 2.0 * network.layer(x) ** 3 + bias
inference = poptorch.inferenceModel(network)
out, _ = inference(x, bias)
print("inference", torch.allclose(out, expected, rtol=1e-5, atol=1e-5))
inference.detachFromDevice()

optimizer = poptorch.optim.SGD(network.parameters(), lr=0.01)
training = poptorch.trainingModel(network, optimizer=optimizer)
losses = [float(training(x, bias)[1]) for _ in range(10)]
print("training", losses[-1] < losses[0])

data = torch.randn(2, 5)
index = torch.tensor([[4, 0, 1], [2, 2, 3]], dtype=torch.int32)
gathered = poptorch.inferenceModel(Gather())(data, index)
print("gather", torch.equal(gathered, data.gather(1, index.long())))
print("leaky", poptorch.inferenceModel(LeakyRelu())(torch.tensor([-1.0, 1.0])).tolist())
outside = poptorch.custom_op([x], "Cube", "popsim_tests", 1, example_outputs=[x])[0]
print("outside", bool((outside == 0).all()))
try:
    poptorch.inferenceModel(Unknown())(x)
except poptorch.Error as error:
    print("error", "there is no operator popsim_tests::Cubed version 1" in str(error))
