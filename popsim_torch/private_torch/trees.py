"""Nested arguments and results: lists, tuples, dictionaries and classes that users register.

Why: only this PyTorch module knows the classes that users registered, and it has no public name.

Checked: 2.13.
"""

from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_is_leaf,
    tree_iter,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "TreeSpec",
    "tree_flatten",
    "tree_is_leaf",
    "tree_iter",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]
