"""Triton kernels of the persistent drafter, one operation per file: reference, kernel, host function."""
