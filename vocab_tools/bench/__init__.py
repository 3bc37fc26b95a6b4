"""Benchmarks of the vocabulary tools, one script per question."""
