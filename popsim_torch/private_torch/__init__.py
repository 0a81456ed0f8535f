"""The one room that reaches for what PyTorch does not offer in public.

A file for each area names what the package needs of it, why there is no public way, and in which
versions of PyTorch it was checked. Names are PyTorch's own without a leading underscore, and they
are the same objects: a call through here costs nothing more. All of them are checked, by the
tests, with the version that ``pyproject.toml`` pins, 2.13; of the others that the package may be
installed with, a file says which ones it was run under, too.
"""
