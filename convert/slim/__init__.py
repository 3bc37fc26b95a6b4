"""What is written of a head: tensors and configuration of the slim one, and its model card."""
