"""OpenAI's API: request bodies, response formats, and one module per endpoint."""
