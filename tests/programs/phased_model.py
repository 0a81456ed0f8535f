"""A model in phases, in the style of PopTorch's guide: blocks, stages, phases, liveness."""

import poptorch
import torch

poptorch.setLogLevel("ERR")


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        self.loss = torch.nn.MSELoss()

    def forward(self, x, target=None):
        for i, layer in enumerate(self.layers):
            with poptorch.Block(f"block{i}"):
                x = torch.tanh(layer(x))
                if i == 3 and target is not None:
                    return x, self.loss(x, target)
        return x


def strategy(kind):
    if kind == "serial":
        phases = [poptorch.Phase(poptorch.Stage(f"block{i}").ipu(0)) for i in range(4)]
        strategy = poptorch.SerialPhasedExecution(*phases)
        strategy.setTensorsLiveness(poptorch.Liveness.OffChipAfterEachPhase)
        return strategy.useSeparateBackwardPhase(False)
    if kind == "parallel":
        phases = [poptorch.Phase(poptorch.Stage(f"block{i}").ipu(i % 2)) for i in range(4)]
        return poptorch.ParallelPhasedExecution(*phases).sendTensorsOffChipAfterFwd(True)
    return poptorch.ShardedExecution(*[poptorch.Stage(f"block{i}").ipu(i % 2) for i in range(4)])


def losses(kind):
    options = poptorch.Options().deviceIterations(2).showCompilationProgressBar(False)
    options.setExecutionStrategy(strategy(kind))
    options.outputMode(poptorch.OutputMode.All)
    options.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False)
    )
    options.setAvailableMemoryProportion({"IPU0": 0.3})
    model = Model()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options, optimizer)
    torch.manual_seed(4)
    x, target = torch.randn(8, 6), torch.randn(8, 6).tanh()
    return torch.cat([training(x, target)[1] for _ in range(30)])


serial, parallel, sharded = (losses(kind) for kind in ("serial", "parallel", "sharded"))
assert torch.equal(serial, sharded) and torch.equal(parallel, sharded)
first, last = serial[:2].mean(), serial[-2:].mean()  # a call returns two losses
print(f"first {first:.4f} last {last:.4f} improved {bool(last < first)}")
