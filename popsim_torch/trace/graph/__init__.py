"""The parts of a traced graph: tensors, operators, nodes, and their origins.

The recording of loops and branches (``trace/control``) uses it, and so does the rest of forward.
"""
