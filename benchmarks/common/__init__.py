"""What the benchmarks share: the models, the contenders, the clock and the tables."""
