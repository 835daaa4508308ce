"""A checkpoint as data: its family, sizes, tensors, tokenizer and chat template."""
