"""Saying, once, that the original forward runs instead of bytetx's."""

import warnings


class FallbackWarning(UserWarning):
    """A wrapped model ran its original forward; the text says why and what to do."""


class Notices:
    """Reasons that one wrapped model has given already."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def say(self, reason: str) -> None:
        """Warns the first time that `reason` comes."""
        if reason not in self.said:
            self.said.add(reason)
            warnings.warn(f"bytetx: the original forward runs: {reason}", FallbackWarning, 2)
