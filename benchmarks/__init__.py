"""Suites, the rivals a user would run instead, records and plots: `python -m benchmarks`."""
