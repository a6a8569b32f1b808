"""What drafters need of a small language model."""
