"""Count tokens on real text and rank the vocabulary."""
