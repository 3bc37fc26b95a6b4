"""What a call of `generate` takes and returns: options, prompts, sampling, statistics, output."""
