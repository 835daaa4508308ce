"""The garbage collector of a serving process."""

import gc

_YOUNG_OBJECTS = 20_000  # made since the last collection, before there is another


def settle_heap() -> None:
    """Call it once a process is ready: models and modules live as long as it does.

    Each request makes some dozens of objects, and collections that visit all of torch's took a
    fifth of the engine's time with thousands of requests a second.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)
