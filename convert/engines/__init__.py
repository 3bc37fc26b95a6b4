"""What each serving engine and trainer can take of a draft head: one file an engine."""
