"""Compile kernels in processes of their own, while the caller goes on."""
