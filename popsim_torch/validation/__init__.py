"""Compares the machine model with published figures."""
