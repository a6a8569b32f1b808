"""Attention of a forward's rows over our KV cache, for transformers models that are left as they are."""
