"""Tests of bench.peers."""
