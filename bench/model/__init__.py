"""Benchmarks of the model: cost of a forward, forced replay, draft models, and peers."""
