"""Texts of many calls tokenised together: each call gets its own rows, and its own errors."""

import threading
from dataclasses import replace

import numpy as np
import pytest
from checkpoints import SENTENCES, save_checkpoint
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.encode.request import Window
from bytetx.errors import InputError, TooLongError
from bytetx.requests.inputs import InputReader
from bytetx.tasks.run import Reading, ReadingPool, _read

LONG = " ".join(SENTENCES[:5] * 3)


class Owner:
    """Keeps what it is told."""

    def __init__(self, *, is_dropped: bool = False):
        self.is_dropped = is_dropped
        self.window: Window | None = None
        self.error: Exception | None = None
        self.is_told = threading.Event()

    def accept(self, window: Window) -> None:
        self.window = window
        self.is_told.set()

    def refuse(self, error: Exception) -> None:
        self.error = error
        self.is_told.set()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> InputReader:
    model = bytetx.load(save_checkpoint(tmp_path_factory.mktemp("bert")), device="cpu")
    return InputReader(model.spec, model.tokenizer)


CALLS = [
    (["a quick dog"], 0),
    ([SENTENCES[4], ("a", "pair"), [5, 6, 7]], 4),
    (["a", 3.5], 0),
    ([LONG], 2),
    (["New York"], 9),
    ([], 3),
]


@pytest.mark.parametrize("prompt", ["", "the dog: "])
@pytest.mark.parametrize("keeps_errors", [False, True])
def test_each_call_reads_as_alone(reader: InputReader, prompt: str, keeps_errors: bool) -> None:
    own = replace(reader, prompt=prompt, keeps_errors=keeps_errors)
    readings = [Reading(Owner(), replace(own), texts, start) for texts, start in CALLS]
    _read(readings)
    for reading in readings:
        try:
            wanted = replace(own).read(reading.texts, reading.start)
        except InputError as error:
            assert type(reading.owner.error) is type(error)
            assert str(reading.owner.error) == str(error)
            continue
        got = reading.owner.window
        assert (got.start, got.num_texts) == (wanted.start, wanted.num_texts)
        for name in ("indices", "seqlens", "token_ids", "is_truncated"):
            np.testing.assert_array_equal(
                getattr(got.requests, name), getattr(wanted.requests, name)
            )
        for name in ("token_type_ids", "prompt_tokens"):  # None is zeros
            ours, theirs = getattr(got.requests, name), getattr(wanted.requests, name)
            np.testing.assert_array_equal(
                0 if ours is None else ours, 0 if theirs is None else theirs
            )
        assert [(f.index, str(f.error)) for f in got.failures] == [
            (f.index, str(f.error)) for f in wanted.failures
        ]


def test_calls_with_one_reader_take_one_tokeniser_call(reader: InputReader) -> None:
    sizes = []

    encode = reader.tokenizer.encode_ids
    reader.tokenizer.encode_ids = lambda texts: sizes.append(len(texts)) or encode(texts)
    try:
        short = [Reading(Owner(), replace(reader), ["a", "dog"], 0) for _ in range(5)]
        other = Reading(Owner(), replace(reader, truncate=True), [LONG], 0)
        many = Reading(Owner(), replace(reader), ["a"] * 40, 0)
        dropped = Reading(Owner(is_dropped=True), replace(reader), ["a"], 0)
        _read([*short, other, many, dropped])
    finally:
        del reader.tokenizer.encode_ids
    assert sizes == [10, 1, 40]
    assert other.owner.window.requests.is_truncated.all()
    assert dropped.owner.window is None


def test_threads_answer_every_call_and_end(reader: InputReader) -> None:
    pool = ReadingPool(3)
    readings = [Reading(Owner(), replace(reader), [f"dog {i}"], 0) for i in range(200)]
    readings.append(Reading(Owner(), replace(reader), [LONG], 0))
    for reading in readings:
        pool.put(reading)
    assert all(reading.owner.is_told.wait(30) for reading in readings)
    for reading in readings[:-1]:
        wanted = reader.read(reading.texts, 0).requests.token_ids
        np.testing.assert_array_equal(reading.owner.window.requests.token_ids, wanted)
    assert type(readings[-1].owner.error) is TooLongError
    threads = pool._threads
    pool.close()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
