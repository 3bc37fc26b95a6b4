"""Generation with converted draft heads."""
