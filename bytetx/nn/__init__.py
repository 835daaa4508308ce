"""The forward pass: embeddings, layers, heads, the KV cache, and how weights are loaded."""
