"""A call of a few texts runs without windows ahead, and gives what a longer call gives."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoints import MAX_POSITIONS, SENTENCES, save_checkpoint
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx import Model
from bytetx.checkpoint import word_pieces
from bytetx.errors import InputError, TooLongError
from bytetx.tasks import run

LONG = "the quick brown fox " * 50_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("bert"), "bert")


@pytest.fixture(scope="module", params=["native", "library"])
def model(request: pytest.FixtureRequest, folder: Path) -> Iterator[Model]:
    """Texts are tokenised by the native core, or all by the library."""
    with pytest.MonkeyPatch.context() as patch:
        least = 0 if request.param == "native" else 1 << 60
        patch.setattr(word_pieces, "_LEAST_CHARACTERS", least)
        yield bytetx.load(folder, device="cpu", token_budget=120)


@pytest.mark.parametrize("texts", [SENTENCES, SENTENCES[:1], [], SENTENCES[::-1]])
def test_few_texts_give_what_windows_give(model: Model, texts: list[str]) -> None:
    few = model.embed(texts)
    windows = model.embed(iter(texts))
    assert few.vectors.shape == (len(texts), model.spec.hidden_size)
    np.testing.assert_array_equal(few.vectors, windows.vectors)
    assert replace(few.stats, seconds=0.0) == replace(windows.stats, seconds=0.0)
    np.testing.assert_array_equal(model.embed(tuple(texts)).vectors, few.vectors)


def test_texts_keep_their_order(model: Model) -> None:
    alone = np.concatenate([model.embed([text]).vectors for text in SENTENCES])
    for num_texts in (len(SENTENCES), 64, 65, 500):
        places = [3 * i % len(SENTENCES) for i in range(num_texts)]
        vectors = model.embed([SENTENCES[place] for place in places]).vectors
        np.testing.assert_array_equal(vectors, alone[places])


def test_a_window_ahead_is_for_more_texts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*args: object) -> None:
        raise AssertionError("windows are read ahead")

    monkeypatch.setattr(run, "ThreadPoolExecutor", unexpected)
    model.embed(SENTENCES[:3])
    model.embed(iter(SENTENCES[:3]))
    with pytest.raises(AssertionError, match="read ahead"):
        model.embed(SENTENCES * 3)  # more tokens than a step has


def test_a_million_characters_are_named_or_cut(model: Model) -> None:
    texts = ["a", LONG, "the"]
    with pytest.raises(TooLongError, match=rf"texts\[1\] has more than the {MAX_POSITIONS} tokens"):
        model.embed(texts)
    cut = model.embed(texts, truncate=True)
    assert cut.stats.num_truncated == 1
    begin = model.embed([LONG[:2000]], truncate=True).vectors[0]
    np.testing.assert_array_equal(cut.vectors[1], begin)
    kept = model.embed(texts, on_error="return")
    assert list(kept.errors) == [1] and np.isnan(kept.vectors[1]).all()
    np.testing.assert_array_equal(kept.vectors[[0, 2]], cut.vectors[[0, 2]])


def test_what_is_no_text_is_named(model: Model) -> None:
    with pytest.raises(InputError, match=r"texts\[1\] is int"):
        model.embed(["a", 5, "the"])  # type: ignore[list-item]
    found = model.embed(["a", None, "the"], on_error="return")  # type: ignore[list-item]
    assert list(found.errors) == [1] and "texts[1] is NoneType" in str(found.errors[1])
    np.testing.assert_array_equal(found.vectors[2], model.embed(["the"]).vectors[0])
