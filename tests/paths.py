"""Where tests find the repository and what is shared among them."""

from pathlib import Path

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
