"""Benchmarks over HTTP: clients, load, and the front end's own cost."""
