"""The books that are kept while forward is traced: origins, gradients, values, tensors of the host.

Loops and branches are recorded (``trace/control``) with them, and so is all else of forward.
"""
