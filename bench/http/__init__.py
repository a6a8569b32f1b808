"""Benchmarks over HTTP: clients, load, and servers that a benchmark starts."""
