"""Measurements: suites, the rivals a user would run instead, records and plots."""
