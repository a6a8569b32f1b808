"""From the target's logits to accepted tokens: processing, sampling, and the acceptance rules."""
