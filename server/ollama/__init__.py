"""Ollama's API: request bodies, their conversion to chats and completions, the format of answers, and what tells of models."""
