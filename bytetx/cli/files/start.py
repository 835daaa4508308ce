"""A job's start without the garbage collector.

What is imported, torch above all, stays until the process ends. The collector would walk it again
and again while it grows: a tenth of the time to the first result.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def starting() -> Iterator[None]:
    """No collection until `started`, or the end of the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def started() -> None:
    """Collect again, but nothing of what there is by now."""
    gc.freeze()
    gc.enable()
