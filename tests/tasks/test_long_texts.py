"""Texts longer than the model: chunks of embed, classify and tag, and spans of one pass."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import transformers
from checkpoints import SENTENCES, edit_json, save_checkpoint, save_sentence_model, texts
from cli_runs import Bytetx
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import quantize_embeddings
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import InputError, OptionError, TooLongError
from bytetx.requests.inputs import InputReader
from bytetx.tasks.chunks import set_chunks
from bytetx.tasks.tag import TagOptions

LONG = [" ".join(SENTENCES[:7]), " ".join(SENTENCES[2:6]), " ".join(SENTENCES[::-1] * 2)]
INPUTS = [LONG[0], "short", *texts(6, max_words=4), LONG[1], "", LONG[2], "a"]
LABELS = {0: "O", 1: "B-A", 2: "I-A", 3: "B-B", 4: "I-B"}


@pytest.fixture(scope="module")
def tagger_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tagger")
    return save_checkpoint(folder, head="ForTokenClassification", id2label=LABELS)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> bytetx.Model:
    modules = [Pooling(48, "mean"), Normalize()]
    return bytetx.load(save_sentence_model(tmp_path_factory.mktemp("embedder"), modules))


def chunk_ids(model: bytetx.Model, text: str, stride: int) -> list[list[int]]:
    """As transformers' tokenizer cuts a text with return_overflowing_tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.checkpoint.sentence.folder)
    return tokenizer(text, truncation=True, stride=stride, return_overflowing_tokens=True).input_ids


@pytest.mark.parametrize("stride", [0, 1, 9, 37])
@pytest.mark.parametrize("aggregation", ["simple", "first", "average", "max"])
def test_tags_are_those_of_the_pipeline(tagger_folder: Path, aggregation: str, stride: int) -> None:
    pipeline = transformers.pipeline(
        "token-classification",
        str(tagger_folder),
        aggregation_strategy=aggregation,
        stride=stride,
        device="cpu",
    )
    model = bytetx.load(tagger_folder)
    given = [text for text in INPUTS if text]
    ours = model.tag(given, aggregation=aggregation, overflow="chunk", stride=stride)
    for text, entities in zip(given, ours, strict=True):
        wanted = pipeline(text)
        for entity, theirs in zip(entities, wanted, strict=True):
            assert (entity.entity, entity.start, entity.end) == (
                theirs["entity_group"],
                theirs["start"],
                theirs["end"],
            )
            assert abs(entity.score - theirs["score"]) < 1e-4 and entity.word == theirs["word"]


@pytest.mark.parametrize("raw", [False, True])
def test_classify_means_the_scores_of_chunks(tmp_path: Path, raw: bool) -> None:
    model = bytetx.load(save_checkpoint(tmp_path, head="ForSequenceClassification"))
    got = model.classify(INPUTS, overflow="chunk", stride=5, raw_scores=raw)
    for text, labels in zip(INPUTS, got, strict=True):
        chunks = model.classify(chunk_ids(model, text, 5), raw_scores=raw)
        wanted = {
            label.label: np.mean([{x.label: x.score for x in c}[label.label] for c in chunks])
            for label in labels
        }
        assert [label.label for label in labels] == sorted(wanted, key=wanted.get, reverse=True)
        for label in labels:
            assert abs(label.score - wanted[label.label]) < 1e-5
    best = model.classify(INPUTS, overflow="chunk", stride=5, raw_scores=raw, top_k=1)
    assert [labels[0] for labels in best] == [labels[0] for labels in got]


@pytest.mark.feature("Tasks", "long texts in chunks")
@pytest.mark.parametrize("stride", [0, 11])
def test_embed_means_the_vectors_of_chunks(embedder: bytetx.Model, stride: int) -> None:
    got = embedder.embed(INPUTS, overflow="chunk", stride=stride).vectors
    for text, vector in zip(INPUTS, got, strict=True):
        chunks = embedder.embed(chunk_ids(embedder, text, stride)).vectors
        mean = chunks.mean(axis=0)
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    whole = embedder.embed(INPUTS, on_error="return")
    short = [i for i in range(len(INPUTS)) if i not in whole.errors]
    assert len(short) == len(INPUTS) - 3
    np.testing.assert_array_equal(got[short], whole.vectors[short])
    streamed = embedder.embed(iter(INPUTS), overflow="chunk", stride=stride, stream=True)
    np.testing.assert_array_equal(np.stack(list(streamed)), got)


def test_company_and_the_budget_change_no_bit(embedder: bytetx.Model, tmp_path: Path) -> None:
    """Chunks of one text run in different steps, among others."""
    got = embedder.embed(INPUTS, overflow="chunk", stride=3).vectors
    for index in (0, 8, 10):
        alone = embedder.embed([INPUTS[index]], overflow="chunk", stride=3).vectors
        np.testing.assert_array_equal(alone[0], got[index])
    small = bytetx.load(embedder.checkpoint.folder, token_budget=45)
    order = np.random.default_rng(0).permutation(len(INPUTS))
    shuffled = small.embed([INPUTS[i] for i in order], overflow="chunk", stride=3).vectors
    np.testing.assert_array_equal(shuffled, got[order])


@pytest.mark.parametrize("precision", ["float16", "int8", "binary"])
def test_the_mean_is_quantised(embedder: bytetx.Model, precision: str) -> None:
    floats = embedder.embed(INPUTS, overflow="chunk").vectors
    ranges = np.stack([floats.min(axis=0), floats.max(axis=0)])
    options = {"ranges": ranges} if precision == "int8" else {}
    got = embedder.embed(INPUTS, overflow="chunk", precision=precision, **options).vectors
    wanted = floats.astype(np.float16)
    if precision != "float16":
        wanted = quantize_embeddings(floats, precision, **options)
    np.testing.assert_array_equal(got, wanted)


def test_counts_and_progress(embedder: bytetx.Model) -> None:
    got = embedder.embed(INPUTS, overflow="chunk", show_progress=True)
    assert got.stats.num_texts == len(INPUTS) and got.stats.num_truncated == 0
    whole = embedder.tokenizer.limited(40, stride=0).backend
    assert got.stats.num_tokens > sum(len(whole.encode(text).ids) for text in INPUTS)


def test_truncate_and_error_as_before(embedder: bytetx.Model) -> None:
    cut = embedder.embed(INPUTS, overflow="truncate").vectors
    np.testing.assert_array_equal(cut, embedder.embed(INPUTS, truncate=True).vectors)
    for options in ({}, {"overflow": "error"}):
        with pytest.raises(TooLongError):
            embedder.embed(INPUTS, **options)


def test_pairs_and_token_ids_are_not_cut(tmp_path: Path) -> None:
    model = bytetx.load(save_checkpoint(tmp_path, head="ForSequenceClassification"))
    given = [("a", "b"), (LONG[0], "b"), [5] * 41, [5] * 40, LONG[1], "x"]
    got = model.classify(given, overflow="chunk", on_error="return")
    assert sorted(got.errors) == [1, 2] and "pairs are not cut" in str(got.errors[1])
    # truncate=True, which is advised elsewhere, does not go with overflow.
    assert "token ids are not cut into chunks; shorten it" in str(got.errors[2])
    assert "truncate" not in str(got.errors[2])
    plain = model.classify([given[i] for i in (0, 3, 5)])
    for ours, theirs in zip((got[0], got[3], got[5]), plain, strict=True):
        assert ours == theirs


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"overflow": "split"}, "overflow must be error, truncate or chunk"),
        ({"overflow": "chunk", "truncate": True}, "exclude each other"),
        ({"stride": 3}, "stride goes with overflow='chunk'"),
        ({"overflow": "chunk", "stride": -1}, "stride must be a number of tokens"),
        ({"overflow": "chunk", "stride": 38}, "less than the 38 tokens of a chunk"),
    ],
)
def test_misuse(embedder: bytetx.Model, options: dict, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        embedder.embed(["a"], **options)


def test_single_tokens_are_not_merged(tagger_folder: Path) -> None:
    with pytest.raises(OptionError, match="needs an aggregation other than none"):
        bytetx.load(tagger_folder).tag(LONG, aggregation="none", overflow="chunk")


@pytest.mark.parametrize("stride", [0, 7])
def test_all_chunks(embedder: bytetx.Model, stride: int) -> None:
    got = embedder.embed_chunks([*INPUTS, [5] * 41], stride=stride, on_error="return")
    assert list(got.errors) == [len(INPUTS)] and len(got[len(INPUTS)]) == 0
    for text, vectors in zip(INPUTS, got, strict=False):
        chunks = embedder.embed(chunk_ids(embedder, text, stride)).vectors
        np.testing.assert_array_equal(vectors, chunks)
    ranges = np.stack([got.vectors.min(axis=0), got.vectors.max(axis=0)])
    small = embedder.embed_chunks(INPUTS, stride=stride, precision="int8", ranges=ranges)
    wanted = quantize_embeddings(got.vectors, "int8", ranges=ranges)
    np.testing.assert_array_equal(small.vectors, wanted)
    with pytest.raises(OptionError, match="needs ranges"):
        embedder.embed_chunks(INPUTS, precision="uint8")


@pytest.mark.parametrize("stride", [0, 7])
def test_chunks_are_in_the_order_of_the_text_where_texts_are_cut_on_the_left(
    embedder: bytetx.Model, stride: int, tmp_path: Path
) -> None:
    folder = shutil.copytree(embedder.checkpoint.sentence.folder, tmp_path / "left")
    edit_json(folder / "tokenizer_config.json", truncation_side="left")
    model = bytetx.load(folder)
    got = model.embed_chunks(INPUTS, stride=stride)
    wanted = embedder.embed_chunks(INPUTS, stride=stride)
    np.testing.assert_array_equal(got.cu_seqlens, wanted.cu_seqlens)
    np.testing.assert_array_equal(got.vectors, wanted.vectors)
    means = [each.embed(LONG, overflow="chunk", prompt="a b: ") for each in (model, embedder)]
    np.testing.assert_array_equal(means[0].vectors, means[1].vectors)
    reader = InputReader(model.spec, model.tokenizer, prompt="a b: ")
    set_chunks(reader, model.tokenizer, stride=stride)
    chunks = reader.read([LONG[0]], 0).requests
    assert [row.tolist() for row in chunks.split()] == chunk_ids(
        embedder, "a b: " + LONG[0], stride
    )
    assert chunks.prompt_tokens[0] > 0 and not chunks.prompt_tokens[1:].any()
    # What is cut off elsewhere is still the left.
    beginning = model.embed([LONG[0]], truncate=True).vectors
    assert not np.array_equal(beginning, embedder.embed([LONG[0]], truncate=True).vectors)


def words(text: str) -> list[tuple[int, int]]:
    """The spans of the words of a text, and two spans over all of it."""
    starts = [i for i in range(len(text)) if text[i] != " " and (i == 0 or text[i - 1] == " ")]
    ends = [text.find(" ", start) for start in starts]
    spans = [(a, b if b > 0 else len(text)) for a, b in zip(starts, ends, strict=True)]
    return [*spans, (0, len(text)), (0, len(text) // 2 + 1)]


@pytest.mark.feature("Tasks", "vectors of spans from one pass")
def test_spans_of_one_pass(embedder: bytetx.Model) -> None:
    given = [text for text in INPUTS if 0 < len(text) < 60]
    spans = [words(text) for text in given]
    got = embedder.embed_spans(given, spans)
    assert np.diff(got.cu_seqlens).tolist() == list(map(len, spans))
    for text, of_text, vectors in zip(given, spans, got, strict=True):
        states = embedder.hidden_states([text])[0][0]
        encoding = embedder.tokenizer.backend.encode(text)
        for (start, end), vector in zip(of_text, vectors, strict=True):
            rows = [
                i
                for i, (a, b) in enumerate(encoding.offsets)
                if a < b and a < end and b > start and not encoding.special_tokens_mask[i]
            ]
            mean = states[rows].mean(axis=0)
            np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=1e-5)
    alone = embedder.embed_spans(given[1:2], spans[1:2])
    np.testing.assert_array_equal(alone[0], got[1])
    few = embedder.embed_spans([given[0], given[1]], [[(0, 3)], []])
    np.testing.assert_array_equal(few[0], embedder.embed_spans(given[:1], [[(0, 3)]])[0])
    assert few[1].shape == (0, 48)


def test_spans_behind_a_prompt_and_beyond_the_cut(embedder: bytetx.Model) -> None:
    prompt, text = "the query: ", "New York is big"
    got = embedder.embed_spans([text], [[(4, 8)]], prompt=prompt)
    at = len(prompt)
    wanted = embedder.embed_spans([prompt + text], [[(at + 4, at + 8)]])
    np.testing.assert_array_equal(got.vectors, wanted.vectors)
    cut = embedder.embed_spans([LONG[0]], [[(0, 5), (250, 260)]], truncate=True)
    assert np.linalg.norm(cut[0][0]) > 0.99 and not cut[0][1].any()


@pytest.mark.parametrize(
    ("texts", "spans", "says"),
    [
        (["a"], [], "one list for each of the texts, got 0 for 1"),
        (["a"], [[(0, 2)]], r"\(0, 2\), which is no \(start, end\) within the 1 characters"),
        (["abc"], [[(2, 2)]], "which is no"),
        ([("a", "b")], [[(0, 1)]], "must be a str"),
        ("a", [[(0, 1)]], "texts must be a list for embed_spans, got str"),
        ((text for text in ["a"]), [[(0, 1)]], "texts must be a list for embed_spans, got gen"),
        (["a"], 3, "spans must be a list for embed_spans, got int"),
        (["a"], [None], r"spans\[0\] must be a list of \(start, end\), got NoneType"),
        (["a"], [[3]], r"spans\[0\] has 3, which is no"),
        (["abc"], [[(0, 1, 2)]], r"has \(0, 1, 2\), which is no"),
        (["a"], [[("0", "1")]], r"has \('0', '1'\), which is no"),
        (["a"], [[(0, 0.5)]], r"has \(0, 0.5\), which is no"),
    ],
)
def test_wrong_spans(embedder: bytetx.Model, texts: list, spans: list, says: str) -> None:
    with pytest.raises(InputError, match=says):
        embedder.embed_spans(texts, spans)


def test_spans_in_arrays(embedder: bytetx.Model) -> None:
    spans = [(0, 5), (3, 9)]
    for form in (np.array(spans), [list(span) for span in spans]):
        got = embedder.embed_spans(LONG[1:2], [form], truncate=True)
        wanted = embedder.embed_spans(LONG[1:2], [spans], truncate=True)
        np.testing.assert_array_equal(got.vectors, wanted.vectors)


def test_command_line(tagger_folder: Path, embedder: bytetx.Model, bytetx: Bytetx) -> None:
    lines = [text for text in INPUTS if text]
    Path("a.txt").write_text("".join(f"{text}\n" for text in lines))
    folder = embedder.checkpoint.folder
    options = ("--overflow", "chunk", "--stride", 4)
    assert bytetx("embed", "a.txt", "-m", folder, "-o", "v.npy", *options).code == 0
    wanted = embedder.embed(lines, overflow="chunk", stride=4).vectors
    np.testing.assert_array_equal(np.load("v.npy"), wanted)
    ran = bytetx("tag", "a.txt", "-m", tagger_folder, *options)
    assert ran.code == 0 and all("error" not in row for row in ran.rows)
    ran = bytetx("tag", "a.txt", "-m", tagger_folder, "--truncate", *options)
    assert ran.code == 2 and "exclude each other" in ran.err


def test_chunks_that_cost_more_than_the_queue_takes_are_refused(tagger_folder: Path) -> None:
    """A stride that leaves a chunk one token of its own makes a chunk per token."""
    model = bytetx.load(tagger_folder, device="cpu")
    stride = model.tokenizer.max_tokens - model.tokenizer.num_special_tokens - 1
    text = "fox " * 1000

    async def main() -> None:
        async with bytetx.AsyncModel(model, max_queued_tokens=10_000) as shared:
            with pytest.raises(TooLongError, match=r"chunks of \d+ tokens.*max_queued_tokens"):
                await shared.tag([text], overflow="chunk", stride=stride)
            failed = await shared.tag(
                ["a fox", text], overflow="chunk", stride=stride, on_error="return"
            )
            assert list(failed.errors) == [1]
            assert len(await shared.tag([text], overflow="chunk", stride=0)) == 1
            options = TagOptions(overflow="chunk", stride=stride)
            estimate = model.context.reader(options).estimate_tokens(text)
            assert estimate > 1000  # so that others are refused while it waits

    asyncio.run(main())
