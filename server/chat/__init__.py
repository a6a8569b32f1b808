"""Between text and tokens: prompts, tool calls, reasoning, structured output."""
