"""Tests of outrider.server.launch."""
