"""`outrider bench pair`: servers that speak OpenAI's API, on the same prompts in turns."""
