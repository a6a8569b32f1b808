"""What a model's forward costs, and what other libraries make of it."""
