"""Options of the tasks: a wrong one is an InputError that names it, never an accident later on."""

from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import InputError

EMBED = [
    ({"dimensions": True}, "dimensions must be an integer from 1 to 48, got True"),
    ({"dimensions": 2.5}, "dimensions must be an integer from 1 to 48, got 2.5"),
    ({"pooling": []}, r"pooling must be one or more of cls, .*, got \[\]"),
    ({"pooling": 5}, "pooling must be one or more of cls, .*, got 5"),
    ({"pooling": ["mean", "best"]}, "pooling must be one or more of cls, .*best"),
    ({"prompt": 3}, "prompt must be a str, got int"),
]
LAYERS = [[], 3, [1.5], ["a"], [True], [3]]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> bytetx.Model:
    return bytetx.load(save_checkpoint(tmp_path_factory.mktemp("encoder")))


@pytest.mark.parametrize(("options", "message"), EMBED)
def test_embed_names_a_wrong_option(
    encoder: bytetx.Model, options: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        encoder.embed(["a"], **options)


@pytest.mark.parametrize("layers", LAYERS)
def test_hidden_states_names_wrong_layers(encoder: bytetx.Model, layers: object) -> None:
    with pytest.raises(InputError, match="layers must be one or more integers from -3 to 2, got"):
        encoder.hidden_states(["a"], layers=layers)


@pytest.mark.parametrize("texts", [None, 5, "one", b"one"])
def test_texts_that_are_no_iterable_of_texts(encoder: bytetx.Model, texts: object) -> None:
    with pytest.raises(InputError, match="texts must be an iterable of texts, got"):
        encoder.embed(texts)


def test_heads_name_wrong_options(tmp_path: Path) -> None:
    masked = bytetx.load(save_checkpoint(tmp_path / "m", head="ForMaskedLM"))
    tagger = bytetx.load(save_checkpoint(tmp_path / "t", head="ForTokenClassification"))
    head = {"head": "ForSequenceClassification", "num_labels": 1}
    ranker = bytetx.load(save_checkpoint(tmp_path / "r", **head))
    for top_k in (None, 0, True, 1.5):
        with pytest.raises(InputError, match="top_k must be a positive integer, got"):
            masked.fill_mask(["a [MASK]"], top_k=top_k)
    with pytest.raises(InputError, match=r"targets must be a list of str, got \[3\]"):
        masked.fill_mask(["a [MASK]"], targets=[3])
    with pytest.raises(InputError, match="ignore_labels must be a list of str, got 'MISC'"):
        tagger.tag(["a"], ignore_labels="MISC")
    with pytest.raises(InputError, match="query must be a str, got int"):
        ranker.rerank(3, ["a"])
    with pytest.raises(InputError, match="documents must be an iterable of texts, got NoneType"):
        ranker.rerank("a", None)
