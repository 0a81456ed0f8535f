"""Compiled models in files: how they are written, and read without running code from a file."""
