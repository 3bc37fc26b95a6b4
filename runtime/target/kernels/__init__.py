"""Triton kernels of the forward over trees, one operation per file: reference, kernel, host function."""
