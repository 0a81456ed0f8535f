"""Searches that models call: points of clouds, and labels of sequences.

Outside of tracing they run on the host, with the same results. None of them has a gradient: what
they return are numbers of rows and labels. What is gathered by those is differentiable.
"""

from popsim_torch.searches.functions import ctc_beam_search_decoder, fps, nearest

__all__ = ["ctc_beam_search_decoder", "fps", "nearest"]
