"""Benchmarks of the runtime, one script per question."""
