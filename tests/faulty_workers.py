"""Workers that stop, hang or hold Python's lock where a test says so: see test_tp_stops.

What a worker does is in a file of the folder FAULTY_WORKERS, named by when and its rank.
"""

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bytetx.checkpoint import weights
from bytetx.executor import worker
from bytetx.nn.transformer import Transformer
from bytetx.parallel import tp


def main(arguments: Sequence[str]) -> None:
    """arguments: as of worker.main, the folder of faults comes from the environment."""
    rank, folder = int(arguments[0]), Path(os.environ["FAULTY_WORKERS"])

    def act(when: str) -> None:
        path = folder / f"{when}-{rank}"
        if not path.exists():
            return
        what = path.read_text()
        path.unlink()
        if what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "hang":
            time.sleep(600)
        elif what == "hang on the GPU":
            torch.cuda._sleep(1 << 40)  # minutes; the host goes on
        elif what == "hold":
            ctypes.PyDLL(None).usleep(2_500_000)  # with Python's lock

    before(Transformer, "forward", lambda: act("forward"))
    before(weights.Weights, "_read", lambda: act("load"))
    before(tp.GroupCollectives, "__init__", lambda: act("join"))
    act("start")
    worker.main(arguments)


def before(owner: type, name: str, do: object) -> None:
    original = getattr(owner, name)

    def patched(*arguments: object, **options: object) -> object:
        do()
        return original(*arguments, **options)

    setattr(owner, name, patched)
