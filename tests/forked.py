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
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import torch

import bytetx
from bytetx.async_model import AsyncModel
from bytetx.generate.async_engine import AsyncEngine
from bytetx.model import Model

SECONDS = 60  # far more than any child takes, and far less than a hang
FORK = multiprocessing.get_context("fork")
TEXTS = [f"a text of {i % 7} words" + " and more" * (i % 5) for i in range(400)]
PROMPTS = [[3, 4, 5], [6, 7], list(range(3, 30))]
GREEDY = bytetx.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


def outcome(work: Callable[[], object]) -> str:
    """Return what becomes of a function that a forked child calls."""
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


class Parent:
    """Models that have computed with two threads, and what their children compute with them."""

    def __init__(self, encoder_folder: str, decoder_folder: str):
        self.folder = encoder_folder
        self.encoder, self.decoder = bytetx.load(encoder_folder), bytetx.load(decoder_folder)
        self.vectors = self.encoder.embed(TEXTS).vectors
        self.labels = [row[0].label for row in self.encoder.classify(TEXTS)]
        self.tokens = answers(self.decoder)

    def embed(self) -> None:
        self.check(self.encoder)

    def check(self, model: Model) -> None:
        np.testing.assert_allclose(model.embed(TEXTS).vectors, self.vectors, atol=1e-6)

    def classify(self) -> None:
        assert [row[0].label for row in self.encoder.classify(TEXTS)] == self.labels

    def generate(self) -> None:
        assert answers(self.decoder) == self.tokens

    def load(self) -> None:
        self.check(bytetx.load(self.folder))

    def fork_again(self) -> None:
        assert outcome(self.embed) == "done"

    def ask_for_threads(self) -> None:
        torch.set_num_threads(2)
        self.embed()

    def use_a_thread(self) -> None:
        done: list[object] = []
        thread = threading.Thread(target=lambda: done.append(self.encoder.embed(TEXTS)))
        thread.start()
        thread.join()
        assert len(done) == 1
        self.embed()

    def make_an_engine(self) -> None:
        with AsyncEngine(self.decoder.engine()) as engine:
            assert async_answer(engine) == self.tokens[0]

    def fork_beside_an_engine(self) -> dict[str, str]:
        with AsyncEngine(self.decoder.engine()) as engine:
            said = {
                "async engine of the parent": outcome(lambda: async_answer(engine)),
                "closes the parent's engine": outcome(engine.close),
            }
            assert async_answer(engine) == self.tokens[0]  # here it goes on
        return said

    def fork_beside_an_async_model(self) -> dict[str, str]:
        unused = AsyncModel(self.encoder)
        said = {"unused async model": outcome(lambda: self.ask(unused))}

        async def main() -> dict[str, str]:
            async with AsyncModel(self.encoder) as batched:
                await batched.embed(TEXTS[:3])
                return {"async model of the parent": outcome(lambda: self.ask_in_thread(batched))}

        return said | asyncio.run(main())

    def ask(self, batched: AsyncModel) -> None:
        async def main() -> None:
            async with batched:
                vectors = (await batched.embed(TEXTS[:3])).vectors
                np.testing.assert_allclose(vectors, self.vectors[:3], atol=1e-6)

        asyncio.run(main())

    def ask_in_thread(self, batched: AsyncModel) -> None:
        """The loop that the child was forked in runs in its only thread."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.ask, batched).result()

    def fork_beside_a_stream(self) -> dict[str, str]:
        stream = self.encoder.embed(iter(TEXTS * 20), stream=True)
        next(stream)
        said = {
            "unfinished stream": outcome(lambda: list(stream)),
            "beside an unfinished stream": outcome(self.embed),
        }
        stream.close()
        return said | {"after the stream": outcome(self.embed)}

    def fork_beside_a_thread(self) -> dict[str, str]:
        """Forks in the middle of another thread's call."""
        is_inside, may_end = threading.Event(), threading.Event()

        def texts() -> Iterator[str]:
            yield from TEXTS * 10
            is_inside.set()
            may_end.wait()

        thread = threading.Thread(target=lambda: self.encoder.embed(texts()))
        thread.start()
        is_inside.wait()
        said = {"while another thread computes": outcome(self.embed)}
        may_end.set()
        thread.join()
        return said

    def fork_a_pool(self) -> None:
        with ProcessPoolExecutor(2, mp_context=FORK) as pool:
            chunks = list(pool.map(self.encoder.embed, [TEXTS[:200], TEXTS[200:]]))
        vectors = np.concatenate([chunk.vectors for chunk in chunks])
        np.testing.assert_allclose(vectors, self.vectors, atol=1e-6)


def main(encoder_folder: str, decoder_folder: str) -> None:
    torch.set_num_threads(2)
    parent = Parent(encoder_folder, decoder_folder)
    said = {
        "embed": outcome(parent.embed),
        "classify": outcome(parent.classify),
        "generate": outcome(parent.generate),
        "load": outcome(parent.load),
        "grandchild": outcome(parent.fork_again),
        "threads": outcome(parent.ask_for_threads),
        "other thread": outcome(parent.use_a_thread),
        "async engine of the child": outcome(parent.make_an_engine),
    }
    said |= parent.fork_beside_an_engine()
    said |= parent.fork_beside_an_async_model()
    said |= parent.fork_beside_a_stream()
    said |= parent.fork_beside_a_thread()
    parent.fork_a_pool()  # which pickles the model
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
