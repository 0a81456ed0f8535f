"""The version of this package."""

RELEASE = "0.1.0"
"""The version of the package; ``pyproject.toml`` has the same."""

__version__ = f"{RELEASE}-1"
"""The version in PopTorch's form, ``x.y.z-suffix``, for tools that compare versions."""
