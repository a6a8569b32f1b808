"""llama.cpp computes the forwards: a GGUF file of any architecture that it has, on any device that it was built for.

Sessions are sequences of one cache, and the leaves of a draft tree are sequences of their own while the tree is verified.
"""
