"""Warnings, once for each reason, that the original forward runs."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_IS_SILENT: ContextVar[bool] = ContextVar("bytetx_is_silent", default=False)


class FallbackWarning(UserWarning):
    """A wrapped model ran its original forward; the text says why and what to do."""


class Notices:
    """The reasons that one wrapped model has warned of."""

    def __init__(self) -> None:
        self.said: set[str] = set()

    def say(self, reason: str, *, runs: str = "the original forward") -> None:
        """Warns at the first occurrence of `reason`."""
        if reason not in self.said and not _IS_SILENT.get():
            self.said.add(reason)
            warnings.warn(f"bytetx: {runs} runs: {reason}", FallbackWarning, 2)


@contextmanager
def silent() -> Iterator[None]:
    """Suppresses notices in this context, because the caller has already warned."""
    token = _IS_SILENT.set(True)
    try:
        yield
    finally:
        _IS_SILENT.reset(token)
