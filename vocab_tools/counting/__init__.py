"""Blocks of a corpus and a tokenizer in, token counts out."""
