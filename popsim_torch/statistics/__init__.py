"""Statistics of tensors: what can be asked for, what comes, and how it is computed and joined."""

from popsim_torch.statistics.channels import ChannelStatistics
from popsim_torch.statistics.histogram import HistogramCounts
from popsim_torch.statistics.merging import merge
from popsim_torch.statistics.requests import (
    MOST_SAMPLES,
    MOST_TOP,
    Channels,
    Counts,
    Fingerprint,
    Histogram,
    Moments,
    Request,
    Sample,
    TopK,
    fitting,
    of_pairs,
)
from popsim_torch.statistics.results import Statistics
from popsim_torch.statistics.vectors import (
    Decoder,
    attributes_of,
    check_requests,
    decode,
    length_of,
    statistics_of,
)

__all__ = [
    "MOST_SAMPLES",
    "MOST_TOP",
    "ChannelStatistics",
    "Channels",
    "Counts",
    "Decoder",
    "Fingerprint",
    "Histogram",
    "HistogramCounts",
    "Moments",
    "Request",
    "Sample",
    "Statistics",
    "TopK",
    "attributes_of",
    "check_requests",
    "decode",
    "fitting",
    "length_of",
    "merge",
    "of_pairs",
    "statistics_of",
]
