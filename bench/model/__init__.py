"""Benchmarks of the model: streams in shared rounds, and what needs a GPU."""
