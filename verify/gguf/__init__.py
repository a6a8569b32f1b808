"""Reads a model's metadata and tokenizer from GGUF files."""
