"""Throughput, affinity and added latency of a Ray cluster, with replicas that sleep instead of computing."""
