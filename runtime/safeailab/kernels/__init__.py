"""Triton kernels under SafeAILab's own forward."""
