"""Rules that turn nodes of a traced graph into ops, one file for each family."""
