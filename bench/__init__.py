"""Benchmarks: they measure every published figure and save it with its command, machine and commit."""
