"""Data that is recorded during the trace of forward: origins, gradients, values, host tensors.

The recording of loops and branches (``trace/control``) uses it, and so does the rest of forward.
"""
