"""Python's collector and thread switches, as a serving process needs them."""

import gc
import sys

_YOUNG_OBJECTS = 20_000  # made since the last collection, before there is another
# That a thread keeps the interpreter's lock while another one waits for it.
_SWITCH_S, _ENGINE_SWITCH_S = 5e-4, 1e-4


def settle_interpreter(*, is_engine: bool = False) -> None:
    """Call it once a process is ready: models and modules live as long as it does.

    is_engine: of front-ends, whose event loop seldom has work; then the steps' thread waits less.
    Each request makes some dozens of objects, and collections that visit all of torch's took a
    fifth of the engine's time with thousands of requests a second. A step of the engine takes the
    interpreter's lock some ten times, each after up to 5 ms of the event loop's by default: with
    2 000 requests a second before a GPU, a shorter turn halved the median latency.
    """
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, 10, 10)
    sys.setswitchinterval(_ENGINE_SWITCH_S if is_engine else _SWITCH_S)
