"""Annotations of PopTorch's guide: each program prints a line for what it has checked."""

import poptorch
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def options(device_iterations=1):
    opts = poptorch.Options()
    opts.showCompilationProgressBar(False)
    opts.deviceIterations(device_iterations)
    opts.randomSeed(42)
    return opts


def serialized_matmul():
    """A classifier over many words, whose last product is cut along the words."""

    class Classifier(nn.Module):
        def __init__(self, mode):
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(200, 16)
            self.mode = mode

        def forward(self, words, labels=None):
            x = self.embedding(words).mean(1)
            logits = poptorch.serializedMatMul(
                x, self.embedding.weight.t(), self.mode, factor=5, keep_precision=True
            )
            if labels is None:
                return logits
            return logits, nn.functional.cross_entropy(logits, labels)

    words, labels = torch.randint(0, 200, (8, 4)), torch.randint(0, 200, (8,))
    mode = poptorch.MatMulSerializationMode
    losses = []
    for chosen in (mode.OutputChannels, mode.Disabled):
        model = Classifier(chosen)
        training = poptorch.trainingModel(
            model, options(), poptorch.optim.Adam(model.parameters(), lr=0.05)
        )
        losses.append([float(training(words, labels)[1]) for _ in range(5)])
    close = torch.allclose(*map(torch.tensor, losses), rtol=1e-4)
    print("serializedMatMul", close, losses[0][-1] < losses[0][0])


def multi_conv():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3, 4, size, padding="same") for size in (1, 3, 5))

        def forward(self, x):
            group = (
                poptorch.MultiConv()
                .availableMemoryProportions([0.2, 0.3, 0.4])
                .partialsTypes(torch.float)
                .planType(poptorch.MultiConvPlanType.Parallel)
            )
            with group:
                results = [conv(x) for conv in self.convs]
            return torch.cat(results, 1)

    model, x = Branches(), torch.randn(2, 3, 8, 8)
    out = poptorch.inferenceModel(model, options())(x)
    expected = torch.cat([conv(x) for conv in model.convs], 1)
    print("MultiConv", torch.allclose(out, expected, atol=1e-5))


def dynamic_slices():
    """A cache that is read and written at a position that each call gives."""

    class Cache(nn.Module):
        def forward(self, cache, entry, position):
            cache = poptorch.dynamic_update(cache, entry, 0, position, 1)
            read = poptorch.dynamic_slice(cache, 0, position, 2, 1)
            return cache, read, cache[position : position + 3]

    model = poptorch.inferenceModel(Cache(), options())
    cache = torch.zeros(6, 2)
    good = True
    for position in (0, 3, 5):
        entry = torch.full((1, 2), float(position + 1))
        expected = cache.clone()
        expected[position] = entry[0]
        cache, read, part = model(cache, entry, torch.tensor([position]))
        good = good and torch.equal(cache, expected)
        good = good and torch.equal(read, expected.roll(-position, 0)[:2])
        good = good and torch.equal(part, expected.roll(-position, 0)[:3])
    print("dynamic slices", good)


def overlap():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x):
            loop = poptorch.OverlapMode.OverlapDeviceIterationLoop
            x = poptorch.set_overlap_for_input(x, loop)
            return poptorch.set_overlap_for_output(self.fc(x), loop)

    opts = options(3)
    opts.setExecutionStrategy(poptorch.ShardedExecution())
    opts.outputMode(poptorch.OutputMode.All)
    opts.TensorLocations.numIOTiles(32)
    model, x = Layer(), torch.randn(6, 4)
    out = poptorch.inferenceModel(model, opts)(x)
    try:
        poptorch.inferenceModel(model, options(3))(x)
        refused = False
    except poptorch.Error as error:
        refused = "Overlapped IO is not supported" in str(error)
    print("overlap", torch.allclose(out, model.fc(x), atol=1e-6), refused)


def recomputation():
    class Net(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 8))
                for _ in range(4)
            )
            self.wrap = wrap

        def forward(self, x):
            for layer in self.layers:
                x = x + self.wrap(layer, x)
                x = poptorch.recomputationCheckpoint(x)
            return poptorch.identity_loss(x.square(), reduction="mean")

    def rebuilt(layer, x):
        return checkpoint(layer, x, use_reentrant=False)

    losses, num_rebuilt = [], []
    for wrap in (rebuilt, lambda layer, x: layer(x)):
        model = poptorch.trainingModel(Net(wrap), options())
        torch.manual_seed(1)
        losses.append([float(model(torch.randn(16, 8))) for _ in range(4)])
        num_rebuilt.append(sum(name.endswith("__re") for name in model.getTensorNames()))
    print("recomputation", losses[0] == losses[1], num_rebuilt[0] > 0, num_rebuilt[1])


if __name__ == "__main__":
    serialized_matmul()
    multi_conv()
    dynamic_slices()
    overlap()
    recomputation()
