"""Describes a decoder in plain values, read from a checkpoint's configuration or from a GGUF file. Knows no device."""
