"""Rules that lower nodes of a traced graph to ops, with one file for each family."""
