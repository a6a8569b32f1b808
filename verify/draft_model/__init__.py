"""Draft models: a runner that sessions share, and each session's cache and tree."""
