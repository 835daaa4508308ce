"""Saying, once, that the original forward runs instead of bytetx's."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_SILENT: ContextVar[bool] = ContextVar("bytetx_is_silent", default=False)


class FallbackWarning(UserWarning):
    """A wrapped model ran its original forward; the text says why and what to do."""


class Notices:
    """Reasons that one wrapped model has given already."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def say(self, reason: str, *, who: str = "the original forward") -> None:
        """Warns the first time that `reason` comes."""
        if reason not in self.said and not _IS_SILENT.get():
            self.said.add(reason)
            warnings.warn(f"bytetx: {who} runs: {reason}", FallbackWarning, 2)


@contextmanager
def silent() -> Iterator[None]:
    """While it is open, what follows from a reason that was said is not said again."""
    token = _IS_SILENT.set(True)
    try:
        yield
    finally:
        _IS_SILENT.reset(token)
