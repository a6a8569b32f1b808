"""Benchmarks: every published figure comes from here, saved with its command, machine and commit."""
