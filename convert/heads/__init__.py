"""A draft head of any published spelling, opened as one `DraftHead`."""
