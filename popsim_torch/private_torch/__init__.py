"""The only package that uses PyTorch features without a public interface.

A file for each area says what the package needs, why there is no public way, and with which
versions of PyTorch it was checked. Importable objects have PyTorch's own name without a leading
underscore, and are the same objects, so calls cost nothing more. Small named functions read and set
private attributes of PyTorch's objects. The tests check all of this with the version that
``pyproject.toml`` pins, 2.13; each file lists the other supported versions with which it was run.
"""
