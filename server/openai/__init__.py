"""OpenAI's API: request bodies, one module per endpoint, and shared modules."""
