"""How samples of a dataset become the elements that one call of a model takes.

``batch_loader`` cuts the data into combined batches, in the calling process; ``partition`` divides
it among processes and ``join`` joins micro-batches. ``accessor`` iterates any data in a ``worker``
process, which ``process`` starts and ends, and whose results come through a ``ring`` of shared
memory; ``layout`` is what all elements have in common.
"""
