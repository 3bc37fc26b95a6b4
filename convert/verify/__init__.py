"""Checks of an artifact against its format, its manifest and what it was made from."""
