"""Texts whose logits or vectors are NaN or infinite: errors of their own in every task."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, save_causal, save_checkpoint, save_m3, save_sentence_model
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.model import Model
from bytetx.ops.pooling import POOLING_MODES, largest

LABELS = {"id2label": {0: "no", 1: "yes", 2: "maybe"}}
TAGS = {"id2label": {0: "O", 1: "B-A", 2: "I-A"}}
LONG = " ".join(SENTENCES[1:4] * 2)
WORD = "lazy"
BAD = f"a {WORD} dog"
GOOD = ["New York is big", "a", "Packed tokens never touch a pad", "it isn't far"]
PLACE = 2  # of the bad text among the good ones

Work = Callable[[Any, Sequence[Any], str], Any]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    """A small model of each kind of head; steps of 64 tokens."""
    folder = tmp_path_factory.mktemp("models")
    head = "ForSequenceClassification"
    saved = {
        "classes": save_checkpoint(folder / "a", head=head, **LABELS),
        "relu": save_checkpoint(folder / "h", "distilbert", head=head, **LABELS),
        "tags": save_checkpoint(folder / "b", head="ForTokenClassification", **TAGS),
        "masks": save_checkpoint(folder / "c", head="ForMaskedLM"),
        "masks relu": save_checkpoint(folder / "i", head="ForMaskedLM", hidden_act="relu"),
        "pairs": save_checkpoint(folder / "d", head=head, num_labels=1),
        "answers": save_checkpoint(folder / "e", head="ForQuestionAnswering", num_labels=2),
        "m3": save_m3(folder / "f", suffix=".safetensors"),
        "causal": save_causal(folder / "g"),
    }
    return {name: bytetx.load(path, token_budget=64) for name, path in saved.items()}


def bad_tokens(model: Model) -> list[int]:
    """The tokens of WORD that no other text of these tests has."""
    assert model.tokenizer is not None
    (word, *others) = (
        model.tokenizer.encode([text])[0].ids
        for text in (BAD, *GOOD, *SENTENCES[1:4], "a dog", "is it", "[MASK]")
    )
    found = sorted(set(word) - set().union(*others))
    assert found
    return found


@contextmanager
def poisoned(model: Model, value: float) -> Iterator[None]:
    """The tokens of WORD have embeddings of this value."""
    word, tokens = model.checkpoint.transformer.embeddings.word, bad_tokens(model)
    kept = word[tokens].clone()
    word[tokens] = value
    try:
        yield
    finally:
        word[tokens] = kept


def ranges(size: int) -> np.ndarray:
    return np.stack([np.full(size, -2.0), np.full(size, 2.0)])


PRECISIONS = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
INTEGERS = ("int8", "uint8")


def embed(**options: Any) -> tuple[str, Work]:
    return "classes", lambda m, x, on_error: m.embed(x, on_error=on_error, **options)


# name: (model, work on a Model or an AsyncModel)
TASKS: dict[str, tuple[str, Work]] = {
    **{f"embed {p}": embed(precision=p, pooling="mean") for p in PRECISIONS},
    **{f"embed {p} chunks": embed(precision=p, overflow="chunk", stride=2) for p in PRECISIONS},
    **{f"embed {p} ranges": embed(precision=p, ranges=ranges(48)) for p in INTEGERS},
    **{f"embed {mode}": embed(pooling=mode, normalize=True) for mode in POOLING_MODES},
    "embed two": embed(pooling=["mean", "max"], dimensions=24, precision="binary"),
    "embed truncated": embed(truncate=True, dimensions=16, normalize=True, precision="ubinary"),
    "embed_chunks": ("classes", lambda m, x, e: m.embed_chunks(x, precision="binary", on_error=e)),
    "embed_spans": (
        "classes",
        lambda m, x, e: m.embed_spans(x, [[(0, 1)]] * len(x), precision="ubinary", on_error=e),
    ),
    **{
        f"embed_tokens {p}": (
            "m3",
            lambda m, x, e, p=p: m.embed_tokens(
                x, precision=p, ranges=ranges(20) if p in INTEGERS else None, on_error=e
            ),
        )
        for p in PRECISIONS
    },
    "embed_sparse": ("masks", lambda m, x, e: m.embed_sparse(x, on_error=e)),
    "embed_sparse relu": ("masks relu", lambda m, x, e: m.embed_sparse(x, on_error=e)),
    "embed_sparse most": (
        "masks",
        lambda m, x, e: m.embed_sparse(x, max_active_dims=5, on_error=e),
    ),
    "embed_sparse m3": ("m3", lambda m, x, e: m.embed_sparse(x, on_error=e)),
    "embed_all": ("m3", lambda m, x, e: m.embed_all(x, on_error=e)),
    "classify": ("classes", lambda m, x, e: m.classify(x, on_error=e)),
    "classify relu": ("relu", lambda m, x, e: m.classify(x, top_k=1, on_error=e)),
    "classify chunks": ("classes", lambda m, x, e: m.classify(x, overflow="chunk", on_error=e)),
    "tag chunks": ("tags", lambda m, x, e: m.tag(x, overflow="chunk", stride=2, on_error=e)),
    **{
        f"tag {a}": ("tags", lambda m, x, e, a=a: m.tag(x, aggregation=a, on_error=e))
        for a in ("none", "simple", "first", "average", "max")
    },
    "fill_mask": (
        "masks",
        lambda m, x, e: m.fill_mask([f"{t} [MASK]" for t in x], top_k=2, on_error=e),
    ),
    "fill_mask targets": (
        "masks",
        lambda m, x, e: m.fill_mask([f"[MASK] {t}" for t in x], targets=["dog"], on_error=e),
    ),
    "score": ("causal", lambda m, x, e: m.score(x, on_error=e)),
    "answer": ("answers", lambda m, x, e: m.answer([("is it", t) for t in x], on_error=e)),
    "answer none": (
        "answers",
        lambda m, x, e: m.answer([(t, LONG) for t in x], allow_no_answer=True, on_error=e),
    ),
    "hidden_states": ("classes", lambda m, x, e: m.hidden_states(x, layers=(0, -1), on_error=e)),
}
LONG_TASKS = ("embed float16 chunks", "embed int8 chunks", "classify chunks", "tag chunks")


def parts_of(result: Any) -> list[Any]:
    """One comparable part for each text without an error, in order."""
    if hasattr(result, "dense"):
        return [
            *parts_of(result.dense),
            *parts_of(result.sparse),
            *parts_of(result.tokens),
        ]
    good = [i for i in range(len(result)) if i not in result.errors]
    return [result[i] for i in good]


def assert_same(got: Any, wanted: Any) -> None:
    """Bit for bit."""
    if isinstance(wanted, np.ndarray):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    elif hasattr(wanted, "__dataclass_fields__"):
        for name in wanted.__dataclass_fields__:
            assert_same(getattr(got, name), getattr(wanted, name))
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted)
        for one, other in zip(got, wanted, strict=True):
            assert_same(one, other)
    else:
        assert got == wanted


def texts_of(name: str) -> tuple[list[str], list[str]]:
    """(texts with one bad among them, the good ones alone)"""
    good = [*GOOD, LONG] if name in LONG_TASKS else GOOD
    bad = f"{LONG} {BAD} {LONG}" if name in LONG_TASKS else BAD
    return [*good[:PLACE], bad, *good[PLACE:]], list(good)


def in_async(model: Model, work: Callable[[Any], Any]) -> Any:
    async def main() -> Any:
        async with bytetx.AsyncModel(model) as served:
            return await work(served)

    return asyncio.run(main())


FRONTS: dict[str, Callable[[Model, Callable[[Any], Any]], Any]] = {
    "Model": lambda model, work: work(model),
    "AsyncModel": in_async,
}


@pytest.mark.feature("Tasks", "numbers that are not finite fail their own text")
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("name", TASKS)
def test_a_text_that_is_not_finite_is_an_error_of_its_own(
    models: dict[str, Model], name: str, front: str
) -> None:
    own, work = TASKS[name]
    model, run = models[own], FRONTS[front]
    mixed, good = texts_of(name)
    wanted = run(model, lambda m: work(m, good, "raise"))
    # The root mean square of a Qwen overflows with it, which makes zeros of such an embedding.
    large = () if own == "causal" else (3e38,)
    for value in (np.nan, np.inf, *large):
        with poisoned(model, value):
            got = run(model, lambda m: work(m, mixed, "return"))
            with pytest.raises(bytetx.NotFiniteError, match=f"text {PLACE} .*not finite"):
                run(model, lambda m: work(m, mixed, "raise"))
        assert list(got.errors) == [PLACE], value
        error = got.errors[PLACE]
        assert type(error) is bytetx.NotFiniteError and f"text {PLACE} " in str(error)
        assert got.stats.num_errors == 1 and got.stats.num_texts == len(mixed)
        assert_same(parts_of(got), parts_of(wanted))
    assert_same(parts_of(run(model, lambda m: work(m, good, "raise"))), parts_of(wanted))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_streams_give_the_error_in_the_texts_place(
    models: dict[str, Model], precision: str
) -> None:
    options: dict[str, Any] = {"precision": precision, "pooling": "mean"}
    if precision in INTEGERS:
        options["ranges"] = ranges(48)
    mixed, good = texts_of("embed")
    model = models["classes"]
    wanted = list(model.embed(good, **options))
    with poisoned(model, np.nan):
        got = list(model.embed(mixed, stream=True, on_error="return", **options))
        many = list(model.embed(mixed * 50, stream=True, on_error="return", **options))
    assert type(got.pop(PLACE)) is bytetx.NotFiniteError
    assert_same(got, wanted)
    is_error = [isinstance(one, bytetx.NotFiniteError) for one in many]
    assert is_error == [i == PLACE for i in range(len(mixed))] * 50


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("raw_scores", [False, True])
def test_a_document_that_is_not_finite_is_left_out(
    models: dict[str, Model], front: str, raw_scores: bool
) -> None:
    model, (mixed, good) = models["pairs"], texts_of("rerank")
    rank = lambda m, x: m.rerank("a", x, raw_scores=raw_scores, on_error="return")  # noqa: E731
    wanted = {hit.document: hit.score for hit in FRONTS[front](model, lambda m: rank(m, good))}
    with poisoned(model, np.nan):
        got = FRONTS[front](model, lambda m: rank(m, mixed))
    assert list(got.errors) == [PLACE] and {hit.document: hit.score for hit in got} == wanted


@pytest.mark.parametrize("options", [{"precision": "binary"}, {"normalize": True}])
def test_a_group_of_small_calls_gives_the_error_to_its_own(
    models: dict[str, Model], options: dict[str, Any]
) -> None:
    model = models["classes"]

    async def main() -> list[Any]:
        async with bytetx.AsyncModel(model) as served:
            calls = [served.embed_soon([text], **options) for text in texts_of("embed")[0]]
            return await asyncio.gather(*calls, return_exceptions=True)

    with poisoned(model, np.nan):
        got = asyncio.run(main())
    assert type(got.pop(PLACE)) is bytetx.NotFiniteError
    wanted = model.embed(GOOD, **options).vectors
    assert_same([one.vectors[0] for one in got], list(wanted))


def rewritten(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The checkpoint with other weights."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_an_activation_hid_a_logit_that_is_infinite(tmp_path: Path) -> None:
    """A logit of 3e38 plus or minus 3e38 times a number within 1: of one sign it overflows."""
    bad = {sign: set[int]() for sign in (1, -1)}
    documents = [*SENTENCES[:6], "b", "dog", "fox", "New"]
    for sign in bad:

        def overflow(tensors: dict[str, torch.Tensor], sign: int = sign) -> None:
            tensors["classifier.weight"].zero_()[0, 0] = sign * 3e38
            tensors["classifier.bias"].fill_(3e38)

        torch.manual_seed(0)
        folder = tmp_path / str(sign)
        save_checkpoint(folder, head="ForSequenceClassification", num_labels=1)
        model = bytetx.load(rewritten(folder, overflow))
        got = model.rerank("a", documents, on_error="return")
        bad[sign] = set(got.errors)
        assert all(hit.score == 1.0 for hit in got)
    assert bad[1] | bad[-1] == set(range(len(documents))) and not bad[1] & bad[-1]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Vectors of some 1e30: finite, but their lengths are not, nor are they as half floats."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("layer.1.output.LayerNorm.weight"):
                tensors[name] *= 1e30

    folder = save_sentence_model(tmp_path_factory.mktemp("large"), [Pooling(48, "mean")])
    return bytetx.load(rewritten(folder, enlarge))


def test_a_length_that_overflows_made_a_vector_of_zeros(large: Model) -> None:
    assert np.isfinite(large.embed(GOOD).vectors).all()
    for options in ({}, {"dimensions": 24}, {"precision": "binary"}, {"pooling": ["cls", "max"]}):
        got = large.embed(GOOD, normalize=True, on_error="return", **options)
        assert len(got.errors) == len(GOOD), options


def test_half_floats_are_checked_as_such(large: Model) -> None:
    for options in ({}, {"overflow": "chunk"}):
        got = large.embed([*GOOD, LONG * 3][: 4 + len(options)], precision="float16",
                          on_error="return", **options)  # fmt: skip
        assert len(got.errors) == len(got) and got.stats.num_errors == len(got)
        with pytest.raises(bytetx.NotFiniteError):
            large.embed(GOOD, precision="float16", **options)

    async def chunked() -> Any:
        async with bytetx.AsyncModel(large) as served:
            return await served.embed(
                [*GOOD, LONG * 3], precision="float16", overflow="chunk", on_error="return"
            )

    got = asyncio.run(chunked())
    assert len(got.errors) == 5 and got.stats.num_errors == 5


def test_ranges_come_from_finite_rows_and_a_lone_one_says_what_to_do(
    models: dict[str, Model],
) -> None:
    model = models["classes"]
    with poisoned(model, np.nan):
        none = model.embed([BAD, BAD], precision="int8", on_error="return")
        assert list(none.errors) == [0, 1] and not none.vectors.any()
        with pytest.raises(bytetx.OptionError, match="pass ranges"):
            model.embed([BAD, "a"], precision="int8", on_error="return")


def test_a_text_that_failed_comes_last_in_a_search(models: dict[str, Model]) -> None:
    masks, m3 = models["masks"], models["m3"]
    mixed, _ = texts_of("search")
    with poisoned(masks, np.nan):
        sparse = masks.embed_sparse(mixed, on_error="return")
        dense = masks.embed(mixed, pooling="mean", on_error="return")
    with poisoned(m3, np.nan):
        tokens = m3.embed_tokens(mixed, on_error="return")
    for vectors, function in ((sparse, "dot"), (dense, "cosine"), (tokens, "maxsim")):
        scores = bytetx.similarity(vectors, vectors, function=function)
        is_bad = torch.arange(len(mixed)) == PLACE
        assert torch.equal(scores.isnan(), is_bad[None] | is_bad[:, None]), function
        found = bytetx.semantic_search(vectors, vectors, function=function)
        kept = [i for i in range(len(mixed)) if i != PLACE]
        assert (found.indices[kept, -1] == PLACE).all()
        assert np.isneginf(found.scores[kept, -1]).all() and np.isneginf(found.scores[PLACE]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_largest_shows_every_number_that_is_not_finite(dtype: torch.dtype) -> None:
    extreme = torch.finfo(dtype).max
    for size in (1, 2, 7, 64):
        x = torch.randn(5, size).to(dtype)
        x[0, size // 2], x[1, -1], x[2, 0], x[4, 0] = torch.nan, torch.inf, -torch.inf, -extreme
        found = largest(x)
        assert found.dtype == torch.float32 and found.shape == (5,)
        assert found.isfinite().tolist() == [False, False, False, True, True]
        assert found[3] == x[3].abs().max() and found[4] == extreme
    assert largest(torch.empty(0, 3, dtype=dtype)).shape == (0,)
