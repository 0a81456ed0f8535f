"""Pipelines that are given as a list of functions."""

from popsim_torch.pipelining.pipeline import pipeline

__all__ = ["pipeline"]
