"""Load on a running server, and what its clients see."""
