"""A layer of a network for point clouds: some points are sampled, all others join the nearest."""

import poptorch
import torch

# Two clouds of 8 points on a line, one far from the other.
PTR = [0, 8, 16]
BATCH = [0] * 8 + [1] * 8
points = torch.cat([torch.arange(8.0), 100 + torch.arange(8.0)]).unsqueeze(1).repeat(1, 3)


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.feature = torch.nn.Linear(3, 8)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, position, target=None):
        rows = poptorch.fps(position, PTR, ratio=0.25)
        centres = position[rows]
        groups = poptorch.nearest(position, centres, BATCH, [0, 0, 1, 1])
        offset = position - centres[groups]
        feature = torch.relu(self.feature(offset))
        pooled = torch.zeros(4, 8).index_add(0, groups, feature)
        result = self.head(pooled)
        if target is None:
            return rows, groups, result
        return rows, groups, poptorch.identity_loss((result - target).square(), "mean")


options = poptorch.Options().showCompilationProgressBar(False)
model = Layer()
inference = poptorch.inferenceModel(model, options)
rows, groups, _ = inference(points)
print("sampled", rows.tolist())
print("groups", groups.tolist())

optimizer = poptorch.optim.Adam(model.parameters(), lr=0.03)
training = poptorch.trainingModel(model, options.clone(), optimizer)
target = torch.tensor([[1.0], [2.0], [1.0], [2.0]])
losses = [float(training(points, target)[2]) for _ in range(60)]
print("loss", losses[0], losses[-1])


class RandomStart(torch.nn.Module):
    def forward(self, position):
        return poptorch.fps(position, [0, 16], ratio=0.1, random_start=True)


def draw(seed):
    options = poptorch.Options().showCompilationProgressBar(False).randomSeed(seed)
    sample = poptorch.inferenceModel(RandomStart(), options)
    return [sample(points).tolist() for _ in range(10)]


print("random", draw(3) == draw(3), draw(3) != draw(4))
