"""Read a call of `generate` and hold what it returns: options, prompts, sampling, statistics, output."""
