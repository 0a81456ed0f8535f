"""A script: an installed package trains like eager PyTorch, and anchors change no bit of it."""

import torch

import popsim_torch as poptorch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3),
            torch.nn.GELU(),
            torch.nn.Flatten(),
            torch.nn.Linear(288, 40),
            torch.nn.LayerNorm(40),
            torch.nn.Linear(40, 4),
            torch.nn.LogSoftmax(dim=-1),
        )

    def forward(self, x, labels):
        y = self.layers(x)
        return y, torch.nn.functional.nll_loss(y, labels)


def model_and_optimizer():
    torch.manual_seed(0)
    model = Model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def losses(anchors):
    options = poptorch.Options().showCompilationProgressBar(False)
    for name in anchors:
        options.anchorTensor(name, name)
    model, optimizer = model_and_optimizer()
    training = poptorch.trainingModel(model, options, optimizer)
    return torch.stack([training(x, labels)[1] for _ in range(5)])


torch.manual_seed(1)
x, labels = torch.randn(16, 3, 8, 8), torch.randint(4, (16,))
eager, optimizer = model_and_optimizer()
expected = []
for _ in range(5):
    optimizer.zero_grad()
    loss = eager(x, labels)[1]
    loss.backward()
    optimizer.step()
    expected.append(loss.detach())
plain = losses([])
torch.testing.assert_close(plain, torch.stack(expected), rtol=1e-4, atol=1e-6)
names = ["Gradient___layers.3.weight", "UpdatedVar___layers.0.weight"]
assert torch.equal(losses(names), plain), "anchors change bits"
print(poptorch.build_info())
