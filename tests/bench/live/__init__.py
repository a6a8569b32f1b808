"""Tests of bench.live."""
