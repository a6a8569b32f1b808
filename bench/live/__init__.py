"""A live model on the tasks of Spec-Bench, beside the programs that users would pick instead."""
