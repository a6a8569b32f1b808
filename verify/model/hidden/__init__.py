"""The target's hidden states, which draft heads read: where they are taken from, and where the last ones are kept."""
