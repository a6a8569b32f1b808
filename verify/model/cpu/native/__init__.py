"""Forwards of decoders on a CPU by machine code of our own, compiled from C++ when the package is built."""
