"""Drafting with an EAGLE head: its weights, dimensions and the plain PyTorch reference."""
