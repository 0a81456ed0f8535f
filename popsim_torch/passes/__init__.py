"""Steps that rewrite the traced graph; each takes a graph and gives the same kind of graph."""
