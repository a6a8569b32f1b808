"""HTTP: the application and its routes, authentication, errors, middleware, server-sent events."""
