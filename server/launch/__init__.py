"""Starts the agents and chat programs that people have, set up for a server."""
