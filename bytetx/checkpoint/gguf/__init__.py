"""GGUF, the file format of llama.cpp: a model's weights, config and tokenizer in one file."""
