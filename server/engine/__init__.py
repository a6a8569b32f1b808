"""The front end's side of the worker: queue, supervision and transport. Imports no torch."""
