"""A decoding step: draft, verify, accept, commit; its buffers, graphs, and the loop around it."""
