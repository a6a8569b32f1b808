"""Coding agents from npm against the server, with forced replay of recorded answers."""
