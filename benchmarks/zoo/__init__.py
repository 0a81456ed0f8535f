"""Whole models that users bring, each small enough to train on a desk."""
