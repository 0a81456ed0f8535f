"""Makes the elements for calls of a model from the samples of a dataset.

``batch_loader`` cuts the data into combined batches, in the calling process; ``partition`` divides
it among processes and ``join`` joins micro-batches. ``accessor`` iterates any data in a ``worker``
process. ``process`` starts and ends the worker, and a ``ring`` of shared memory passes on its
elements; ``layout`` describes the structure of all elements.
"""
