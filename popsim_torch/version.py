"""The version of this package."""

RELEASE = "0.1.0"
"""As packages are numbered; ``pyproject.toml`` has it, too."""

__version__ = f"{RELEASE}-1"
"""In PopTorch's form, ``x.y.z-suffix``; tools that compare versions can read it."""
