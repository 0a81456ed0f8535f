"""What iterates over a ``torch.utils.data.DataLoader``.

Why: the iterator that ``iter(loader)`` returns is of a class without a public name, and a loop has
to know it from any other iterator.

Checked: 2.13.
"""

from torch.utils.data.dataloader import _BaseDataLoaderIter as BaseDataLoaderIter

__all__ = ["BaseDataLoaderIter"]
