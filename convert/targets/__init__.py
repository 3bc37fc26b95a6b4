"""The target of a head: which model it is, whether the two fit, and the LM head whose rows are gathered."""
