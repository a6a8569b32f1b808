"""Quantised weights of checkpoints."""
