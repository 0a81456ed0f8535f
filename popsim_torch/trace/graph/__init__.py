"""What a traced graph is made of, whoever records it: tensors, operators, nodes, their origins.

Loops and branches are recorded (``trace/control``) with it, and so is all else of forward.
"""
