"""Making a screen: the states of a head on text, the best factors for them, and what the screen keeps of others."""
