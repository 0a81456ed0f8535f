"""Loops and branches: functions that are recorded once, and nodes that run them."""
