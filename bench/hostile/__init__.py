"""Attacks on a server, which `bench.soak` sends."""
