"""A process that computes with two threads and then forks: what each child does, as JSON.

`python forked.py ENCODER DECODER` prints {name of the child: "done", "hangs" or its error}.
"""

import asyncio
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch

import bytetx
from bytetx.engine.async_engine import AsyncEngine
from bytetx.model import Model

SECONDS = 60  # far more than any child takes, and far less than a hang
FORK = multiprocessing.get_context("fork")
TEXTS = [f"a text of {i % 7} words" + " and more" * (i % 5) for i in range(400)]
PROMPTS = [[3, 4, 5], [6, 7], list(range(3, 30))]
GREEDY = bytetx.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def outcome(work: Callable[[], object]) -> str:
    """What becomes of a function that a forked child calls."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            work()
            said = "done"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read().decode()
    os.waitpid(child, 0)
    return said or "hangs"


def answers(decoder: Model) -> list[list[int]]:
    return [list(answer.token_ids) for answer in decoder.generate(PROMPTS, GREEDY)]


def async_answer(engine: AsyncEngine) -> list[int]:
    async def ask() -> list[int]:
        return [t async for piece in engine.generate(PROMPTS[0], GREEDY) for t in piece.token_ids]

    return asyncio.run(asyncio.wait_for(ask(), SECONDS))


def anew(decoder: Model) -> list[int]:
    with AsyncEngine(decoder.engine()) as engine:
        return async_answer(engine)


def main(encoder_folder: str, decoder_folder: str) -> None:
    torch.set_num_threads(2)
    encoder, decoder = bytetx.load(encoder_folder), bytetx.load(decoder_folder)
    vectors, labels, tokens = (
        encoder.embed(TEXTS).vectors,
        encoder.classify(TEXTS),
        answers(decoder),
    )

    def embed(model: Model = encoder) -> None:
        np.testing.assert_allclose(model.embed(TEXTS).vectors, vectors, atol=1e-6)

    def classify() -> None:
        best = [row[0].label for row in encoder.classify(TEXTS)]
        assert best == [row[0].label for row in labels]

    def generate() -> None:
        assert answers(decoder) == tokens

    def asks_for_threads() -> None:
        torch.set_num_threads(2)
        embed()

    def in_a_thread() -> None:
        with_result: list[object] = []
        thread = threading.Thread(target=lambda: with_result.append(encoder.embed(TEXTS)))
        thread.start()
        thread.join()
        assert len(with_result) == 1
        embed()

    said = {
        "embed": outcome(embed),
        "classify": outcome(classify),
        "generate": outcome(generate),
        "load": outcome(lambda: embed(bytetx.load(encoder_folder))),
        "grandchild": outcome(lambda: json.dumps(assert_done(outcome(embed)))),
        "threads": outcome(asks_for_threads),
        "other thread": outcome(in_a_thread),
        "async engine of the child": outcome(lambda: anew(decoder)),
    }
    with AsyncEngine(decoder.engine()) as engine:
        said["async engine of the parent"] = outcome(lambda: async_answer(engine))
        said["closes the parent's engine"] = outcome(engine.close)
        assert async_answer(engine) == tokens[0]  # here it goes on

    stream = encoder.embed(iter(TEXTS * 20), stream=True)
    next(stream)
    said["unfinished stream"] = outcome(lambda: list(stream))
    said["beside an unfinished stream"] = outcome(embed)
    stream.close()
    said["after the stream"] = outcome(embed)
    said["while another thread computes"] = while_computing(encoder, embed)
    with ProcessPoolExecutor(2, mp_context=FORK) as pool:
        chunks = list(pool.map(encoder.embed, [TEXTS[:200], TEXTS[200:]]))  # pickles the model
    np.testing.assert_allclose(np.concatenate([c.vectors for c in chunks]), vectors, atol=1e-6)
    print(json.dumps(said))


def assert_done(said: str) -> str:
    assert said == "done", said
    return said


def while_computing(model: Model, embed: Callable[[], None]) -> str:
    """Forks in the middle of another thread's call."""
    is_inside, may_end = threading.Event(), threading.Event()

    def texts() -> Iterator[str]:
        yield from TEXTS * 10
        is_inside.set()
        may_end.wait()

    thread = threading.Thread(target=lambda: model.embed(texts()))
    thread.start()
    is_inside.wait()
    said = outcome(embed)
    may_end.set()
    thread.join()
    return said


if __name__ == "__main__":
    main(*sys.argv[1:])
