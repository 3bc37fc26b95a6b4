"""The slim head on disk: its tensors, manifest and model card, and what each engine asks of it."""
