"""What lowering adds ops with: the builder of a graph, and small element-wise programs."""
