"""Steps on a CPU: packed layers, traces, and attention in the order of the text."""
