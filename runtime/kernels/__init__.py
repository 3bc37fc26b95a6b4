"""One operation per file: reference, Triton kernel, host function."""
