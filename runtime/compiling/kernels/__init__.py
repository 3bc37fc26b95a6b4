"""Know what Triton compiles, and compile it."""
