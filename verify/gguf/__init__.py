"""What GGUF files say of a model: its metadata and its tokenizer."""
