"""show_progress: a bar on stderr that counts texts, whatever is read and however results come."""

from collections.abc import Callable, Iterator

import pytest
from checkpoints import save_checkpoint
from tiny import one_thread, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.model import Model

TEXTS = ["a text", "another text, which is longer", "x"] * 3
GREEDY = bytetx.SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("encoder")
    config = {"head": "ForSequenceClassification", "id2label": {0: "answer"}}
    return bytetx.load(save_checkpoint(folder, **config), token_budget=16)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return bytetx.load(save(tiny_decoder("llama"), tmp_path_factory.mktemp("decoder")))


Shown = Callable[[], str]


@pytest.fixture
def shown(capfd: pytest.CaptureFixture) -> Shown:
    """Return what the terminal got since the last call; fails where stdout got anything."""

    def read() -> str:
        out, err = capfd.readouterr()
        assert out == ""
        return err

    return read


def texts() -> Iterator[str]:
    yield from TEXTS


def test_no_bar_unless_it_is_asked_for(encoder: Model, shown: Shown) -> None:
    encoder.embed(TEXTS)
    list(encoder.embed(texts(), stream=True))
    assert shown() == ""


def test_a_list_is_counted_to_its_length(encoder: Model, shown: Shown) -> None:
    vectors = encoder.embed(TEXTS, show_progress=True)
    err = shown()
    assert "embed" in err and "9/9 texts" in err
    assert (vectors.vectors == encoder.embed(TEXTS).vectors).all()


def test_a_generator_has_no_known_length(encoder: Model, shown: Shown) -> None:
    assert len(encoder.embed(texts(), show_progress=True)) == 9
    err = shown()
    assert "9 texts" in err and "/9" not in err


def test_texts_that_fail_are_counted_too(encoder: Model, shown: Shown) -> None:
    bad = ["a " * 500, *TEXTS, [10**6]]
    assert len(encoder.embed(bad, on_error="return", show_progress=True).errors) == 2
    assert "11/11 texts" in shown()


def test_a_stream_shows_a_bar_until_it_is_closed(encoder: Model, shown: Shown) -> None:
    assert len(list(encoder.embed(texts(), stream=True, show_progress=True))) == 9
    assert "9 texts" in shown()
    stream = encoder.classify(TEXTS, stream=True, show_progress=True)
    next(stream)
    stream.close()
    assert "/9 texts" in shown()
    encoder.embed(TEXTS, stream=True, show_progress=True).close()  # nothing was read
    assert shown() == ""


def test_two_streams_at_a_time(encoder: Model, shown: Shown) -> None:
    streams = [encoder.embed(TEXTS, stream=True, show_progress=True) for _ in range(2)]
    assert [len(vectors) for vectors in zip(*streams, strict=True)] == [2] * 9
    assert shown().count("9/9 texts") == 2


@pytest.mark.feature("Python", "progress bars")
def test_every_task_has_a_bar(encoder: Model, decoder: Model, shown: Shown) -> None:
    encoder.classify(TEXTS, show_progress=True)
    encoder.hidden_states(TEXTS, show_progress=True)
    encoder.rerank("a", TEXTS, show_progress=True)
    err = shown()
    assert err.count("9/9 texts") == 3
    assert all(title in err for title in ("classify", "hidden_states", "rerank"))
    decoder.score([[1, 2, 3], [4, 5]], show_progress=True)
    assert "2/2 texts" in shown()


@pytest.mark.parametrize("stream", [False, True, "pieces"])
def test_generate_counts_prompts(decoder: Model, shown: Shown, stream: object) -> None:
    prompts = [[1, 2, 3], [4], [5, 6], [10**6]]
    options = {"stream": stream, "on_error": "return", "show_progress": True}
    list(decoder.generate(prompts, GREEDY, **options))
    err = shown()
    assert "generate" in err and "4/4 texts" in err
