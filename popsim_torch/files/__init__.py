"""Compiled models in files: what is written where, and how it is read without running any of it."""
