"""The common code of the benchmarks: the models, the contenders, the clock and the tables."""
