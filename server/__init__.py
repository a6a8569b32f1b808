"""The server: HTTP API, settings, command line, queue, worker process, sessions, metrics."""
