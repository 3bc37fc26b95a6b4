"""A corpus: named, weighted sources, opened as blocks of records."""
