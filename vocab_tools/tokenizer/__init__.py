"""The target's tokenizer: loading it, encoding with it, its chat template, the ids it cannot do without."""
