"""Searches that models call: for points in point clouds, and for labels of sequences.

Outside of tracing they run on the host, with the same results. None of them has a gradient, because
the results are row numbers and labels. Values that a model gathers with these are differentiable.
"""

from popsim_torch.searches.functions import ctc_beam_search_decoder, fps, nearest

__all__ = ["ctc_beam_search_decoder", "fps", "nearest"]
