"""Tests of bench/ablations."""
