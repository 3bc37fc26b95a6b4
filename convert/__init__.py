"""Draft heads in, slim artifacts out."""
