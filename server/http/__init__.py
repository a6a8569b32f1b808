"""The HTTP application: routes, keys, errors, middleware and server-sent events."""
