"""Ten minutes of 200 clients with attacks beside them, and then faults of every process."""
