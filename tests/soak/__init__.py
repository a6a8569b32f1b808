"""Ten minutes of 200 clients with attacks and damaged files beside them, and then faults of every process."""
