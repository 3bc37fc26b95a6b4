"""Conversations and a chat template → the stretches of text whose tokens are counted."""
