"""One network as a pipeline, in the ways of the tutorials: layers, contexts, functions."""

import poptorch
import torch
from torch import nn

poptorch.setLogLevel("ERR")
COUNT, RATE = 8, 0.1
schedules = poptorch.PipelineSchedule
torch.manual_seed(2)
DATA = [(torch.rand(16, 12), torch.randint(0, 4, (16,))) for _ in range(COUNT)]


def layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))


class Classifier(nn.Module):
    """Layers and a loss."""

    def __init__(self):
        super().__init__()
        self.layers = layers()

    def forward(self, x, labels):
        out = self.layers(x)
        return nn.functional.cross_entropy(out, labels)


class InContexts(Classifier):
    """The same with a context around each part of forward."""

    def forward(self, x, labels):
        with poptorch.PipelineStage(0):
            x = self.layers[:2](x)
        with poptorch.PipelineStage(1):
            return nn.functional.cross_entropy(self.layers[2:](x), labels)


def train(model, schedule):
    poptorch.set_pipelining_options(
        model, COUNT, device_mapping=[0, 1], accumulate_outfeed=True, pipeline_schedule=schedule
    )
    options = poptorch.Options().showCompilationProgressBar(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    training = poptorch.trainingModel(model, options, optimizer)
    x, labels = (torch.cat(part) for part in zip(*DATA, strict=True))
    return torch.stack([training(x, labels) for _ in range(10)]) / COUNT


def train_functions(schedule):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    infeed, outfeed = poptorch.InfeedQueue(DATA * 10), poptorch.OutfeedQueue()

    def stage1(x, labels):
        return model[:2](x), labels

    def stage2(x, labels):
        return nn.functional.cross_entropy(model[2:](x), labels)

    @poptorch.function
    def run():
        poptorch.pipeline(
            [stage1, stage2],
            gradient_accumulation_count=COUNT,
            repeat_count=10,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=lambda loss: (optimizer, loss),
            accumulate_outfeed=True,
            pipeline_schedule=schedule,
        )

    run()
    return outfeed.dequeue() / COUNT


for schedule in (schedules.Grouped, schedules.Interleaved, schedules.Sequential):
    assigned = Classifier()
    poptorch.set_pipeline_stage_assignment(assigned.layers, [0, 0, 1, 1, 1])
    losses = [train(assigned, schedule), train(InContexts(), schedule), train_functions(schedule)]
    same = all(torch.allclose(one, losses[0], atol=1e-6) for one in losses)
    first, last = losses[0][0], losses[0][-1]
    print(f"{schedule.name} same {same} first {first:.4f} improved {bool(last < first)}")
poptorch.print_pipeline_stage_assignment_summary(assigned.layers)
