"""Chat templates, tool calls, reasoning, structured output and token text."""
