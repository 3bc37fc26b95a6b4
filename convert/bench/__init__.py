"""Benchmarks of the converter, one script per question."""
