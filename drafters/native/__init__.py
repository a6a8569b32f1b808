"""The drafters' inner loops, compiled from C++ when the package is built."""
