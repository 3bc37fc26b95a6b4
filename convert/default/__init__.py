"""The head, counts and chats that `eagle-convert` uses when none are named."""
