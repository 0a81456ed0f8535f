"""Holds a compiled model: the steps from the user's module to the executable, and its state."""
