"""Two parts of a network side by side in a pipeline, and mistakes that are easy to make there."""

import poptorch
import torch
from torch import nn

poptorch.setLogLevel("ERR")
COUNT, REPEATS, RATE = 16, 4, 0.1
torch.manual_seed(2)
DATA = [(torch.rand(8, 12), torch.randint(0, 4, (8,))) for _ in range(COUNT * REPEATS)]


class Parts(nn.Module):
    """An embedding, two encoders that do not need each other, and a head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Linear(12, 16)
        self.wide = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 8))
        self.deep = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))
        self.mix, self.head = nn.Linear(16, 8), nn.Linear(8, 4)


def functions(parts):
    def stage0(x, labels):
        return parts.embed(x), labels

    def stage1a(x, labels):
        return parts.wide(x)

    def stage1b(x, labels):
        return parts.deep(x), labels

    def stage2(wide, deep, labels):
        return parts.mix(torch.cat([wide, deep], 1)).relu(), labels

    def stage3(x, labels):
        return nn.functional.cross_entropy(parts.head(x), labels)

    return [stage0, [stage1a, stage1b], stage2, stage3]


def train(schedule, mapping, stages=functions, count=COUNT):
    parts = Parts()
    optimizer = torch.optim.SGD(parts.parameters(), lr=RATE)
    infeed, outfeed = poptorch.InfeedQueue(DATA), poptorch.OutfeedQueue()

    @poptorch.function(options=poptorch.Options().autoRoundNumIPUs(True))
    def run():
        poptorch.pipeline(
            computational_stages=stages(parts),
            gradient_accumulation_count=count,
            repeat_count=REPEATS,
            infeed_queue=infeed,
            outfeed_queue=outfeed,
            optimizer_function=lambda loss: (optimizer, loss),
            device_mapping=mapping,
            pipeline_schedule=schedule,
        )

    run()
    infeed.close()
    return outfeed.dequeue(), parts.head.weight.detach().clone()


def eager():
    parts, losses = Parts(), []
    optimizer = torch.optim.SGD(parts.parameters(), lr=RATE)
    embed, (wide, deep), mix, head = functions(parts)
    for number, (x, labels) in enumerate(DATA):
        x, labels = embed(x, labels)
        loss = head(*mix(wide(x, labels), *deep(x, labels)))
        loss.backward()
        losses.append(loss.detach())
        if number % COUNT == COUNT - 1:
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses), parts.head.weight.detach()


expected = eager()
for schedule in poptorch.PipelineSchedule:
    own = schedule == poptorch.PipelineSchedule.Interleaved
    results = train(schedule, [0, [1, 2], 3, 4] if own else [0, [1, 2], 2, 3])
    same = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(results, expected, strict=True))
    print(f"{schedule.name} same {same}")


def told(title, *args, **kwargs):
    try:
        train(*args, **kwargs)
    except Exception as error:
        print(f"{title}: {error}")


GROUPED = poptorch.PipelineSchedule.Grouped


def with_other_arguments(parts):
    first, (a, _), *rest = functions(parts)
    return [first, [a, lambda x: parts.deep(x)], *rest]


def with_a_result_too_much(parts):
    first, (a, b), *rest = functions(parts)
    return [first, [lambda x, labels: (a(x, labels), labels), b], *rest]


told("flat", GROUPED, [0, 1, 2, 2, 3])
told("arguments", GROUPED, [0, [1, 2], 2, 3], with_other_arguments)
told("results", GROUPED, [0, [1, 2], 2, 3], with_a_result_too_much)
told("count", GROUPED, [0, [1, 2], 2, 3], count=10)
told("interleaved", poptorch.PipelineSchedule.Interleaved, [0, [1, 2], 2, 3])
told("nested", GROUPED, [0, [1, [2]], 2, 3])
