"""OpenAI's API: request bodies, one module per endpoint, and what the endpoints share."""
