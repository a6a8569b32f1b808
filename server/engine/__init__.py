"""The front end's side of the worker: queue, quotas, supervision and transport. Imports neither torch nor numba."""
