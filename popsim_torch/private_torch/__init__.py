"""The one room that reaches for what PyTorch does not offer in public.

A file for each area names what the package needs of it, why there is no public way, and in which
versions of PyTorch it was checked. What can be imported has PyTorch's own name without a leading
underscore, and is the same object: a call through here costs nothing more. Private attributes of
PyTorch's objects are read and set by small functions with names of their own. All of it is checked,
by the tests, with the version that ``pyproject.toml`` pins, 2.13; of the others that the package
may be installed with, a file says which ones it was run under, too.
"""
