"""Turns the target's logits into accepted tokens: processing, sampling, and the acceptance rules."""
