"""What holds a compiled model: the way from the user's module to the executable, and its state."""
