"""Tests of bench/others."""
