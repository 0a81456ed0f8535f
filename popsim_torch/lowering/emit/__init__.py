"""Adds ops to a program: the builder of a graph, and small elementwise programs."""
