"""Where heads and targets come from: folders, the Hub, and the built-in default."""
