"""Weights files: read lazily and checked, rows gathered, written tensor by tensor."""
