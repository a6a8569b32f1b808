"""Steps on a GPU: Triton kernels under CUDA graphs."""
