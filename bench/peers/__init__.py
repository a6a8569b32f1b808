"""Other programs that serve the same weights, measured beside Outrider."""
