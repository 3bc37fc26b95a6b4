"""Open a head and a target, and check that they belong together before weights are loaded."""
