"""Queues that bring tensors into a running program and out of it."""

from popsim_torch.feeds.benchmark import dataset_benchmark, infeed_benchmark
from popsim_torch.feeds.infeed import InfeedQueue
from popsim_torch.feeds.outfeed import OutfeedMode, OutfeedQueue

__all__ = ["InfeedQueue", "OutfeedMode", "OutfeedQueue", "dataset_benchmark", "infeed_benchmark"]
