"""The loop: draft, verify, accept, and what is asked of it and comes out."""
