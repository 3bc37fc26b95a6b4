"""The draft vocabulary itself, its token maps, and the formats of other tools."""
