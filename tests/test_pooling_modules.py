"""Every module of sentence-transformers against its own encode()."""
