"""Triton kernels of a step beside drafter and target, one operation per file: reference, kernel, host function."""
