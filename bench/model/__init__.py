"""Benchmarks of the model: the cost of a forward, streams in shared rounds, and what needs a GPU."""
