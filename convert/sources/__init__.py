"""Sources of heads and targets: folders, the Hub, and the built-in default."""
