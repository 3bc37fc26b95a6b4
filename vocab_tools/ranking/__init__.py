"""Token counts in, a ranked draft vocabulary out, and what it covers."""
