"""OpenAI's protocol: chat completions, completions and responses."""
