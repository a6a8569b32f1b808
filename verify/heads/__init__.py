"""Draft heads: small networks that draft from the target's hidden states, loaded from their published layouts."""
