"""A run as a whole: order, streams, threads, memory, and the real MiniLM."""
