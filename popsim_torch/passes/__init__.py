"""Passes that rewrite a program in place; ``pipeline`` has their list and order."""
