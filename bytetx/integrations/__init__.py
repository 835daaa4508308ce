"""Embedders for frameworks: LangChain, LlamaIndex and Haystack, each in a module of its own."""
