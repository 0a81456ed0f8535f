"""Calls of the host in the middle of a program, in the style of PopTorch's guide."""

import poptorch
import torch


class Postprocess(torch.nn.Module):
    """Keeps a history, which lasts from call to call."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = torch.nn.Linear(4, 4)
        self.history = []

    def forward(self, x, mask):
        assert not poptorch.isRunningOnIpu()
        y = self.linear(x)
        self.history.append((float(y.sum()), mask.dtype))
        return torch.where(mask, y, torch.zeros_like(y)), y.argmax(-1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.post = Postprocess()
        self.cpu = poptorch.CPU(self.post, "Postprocess")

    def forward(self, x):
        with poptorch.Block("first", ipu_id=0):
            x = torch.relu(self.first(x))
        with poptorch.Block("second", ipu_id=1):
            kept, best = self.cpu(x, x > 0.1)
            return self.last(kept), best


def main():
    options = poptorch.Options().showCompilationProgressBar(False)
    options.deviceIterations(4)
    model = Model()
    print("frozen", not model.post.linear.weight.requires_grad)
    inference = poptorch.inferenceModel(model, options)
    x = torch.linspace(-1, 2, 32).view(8, 4)
    out, best = inference(x)
    print("calls", len(model.post.history), model.post.history[1][1])
    expected, expected_best = model(x)
    torch.testing.assert_close(out, expected.detach())
    print("same", torch.equal(best.long(), expected_best), best.dtype)

    def fail(x, mask):
        raise ValueError("not today")

    model.cpu = poptorch.CPU(fail, "Failing")
    inference = poptorch.inferenceModel(model, options)
    try:
        inference(x)
    except ValueError as error:
        print("raised", error)
    model.cpu = poptorch.CPU(lambda x, mask: {"x": x}, "Dict")
    try:
        poptorch.inferenceModel(model, options)(x)
    except poptorch.Error as error:
        print("refused", "tuple of tensors" in str(error))


main()
