"""What is asked of a generation and what comes out: options, prompts, streaming, statistics, output."""
