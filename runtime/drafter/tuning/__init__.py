"""Tune the persistent drafter: random problems, agreement with the reference, timing, compiling."""
