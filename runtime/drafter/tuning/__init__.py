"""What tuning the persistent drafter takes: random problems, agreement with the reference, timing, compiling ahead."""
