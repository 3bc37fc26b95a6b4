"""The LM head whose rows a slim head gets: the head's own, or its target's."""
