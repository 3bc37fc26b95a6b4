"""A slim head as it is written: tensors, configuration, model card."""
