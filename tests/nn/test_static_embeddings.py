"""Static embeddings against model2vec and sentence-transformers, which differ for one folder."""

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, edit_json, make_tokenizer, save_checkpoint, texts
from model2vec import StaticModel
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling, StaticEmbedding
from static_models import LIMIT, SIZE, bare, save_model2vec
from tiny import one_thread, randomize  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import CheckpointError, InputError, OptionError, TooLongError

UNKNOWN = "鬱"  # in no vocabulary of the tests
INPUTS = [
    *SENTENCES,
    *texts(20, max_words=9),
    UNKNOWN,
    f"fox {UNKNOWN} dog",
    "fox dog " * 400,
    f"{UNKNOWN} fox " * 300,
    "unbelievable" * 300,  # beyond the characters, but hardly any tokens where words are whole
    "[SEP] [CLS] </s> fox",
]
KINDS = ("wordpiece", "bpe", "unigram")


def embed(folder: Path, **options: object) -> np.ndarray:
    return bytetx.load(folder, device="cpu").embed(INPUTS, truncate=True, **options).vectors


@pytest.mark.feature("Checkpoints", "static embeddings (Model2Vec, StaticEmbedding)")
@pytest.mark.parametrize("weights", ["plain", "weighted", "mapped", "int8", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_those_of_both_packages(kind: str, weights: str, tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "model", kind, weights=weights)
    wanted = SentenceTransformer(str(folder), device="cpu").float().encode(INPUTS)
    theirs = embed(folder)
    np.testing.assert_allclose(theirs, wanted, atol=1e-5)
    own = StaticModel.from_pretrained(bare(folder)).encode(INPUTS)
    found = embed(folder)
    # It rounds means, and vectors of unit length, to the table's dtype.
    np.testing.assert_allclose(found, own, atol=2e-3 if weights == "float16" else 1e-5)
    # Unknown tokens, which byte-level BPE has not, count in one of the two alone.
    place = INPUTS.index(f"fox {UNKNOWN} dog")
    assert np.allclose(theirs[place], found[place], atol=1e-5) == (kind == "bpe")
    assert not found[INPUTS.index("")].any()


@pytest.mark.parametrize("kind", KINDS)
def test_model2vec_without_a_limit(kind: str, tmp_path: Path) -> None:
    folder = bare(save_model2vec(tmp_path / "model", kind, limit=None))
    own = StaticModel.from_pretrained(folder).encode(INPUTS)
    found = bytetx.load(folder, device="cpu").embed(INPUTS).vectors
    np.testing.assert_allclose(found, own, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model2vec_config_of_an_older_version(kind: str, tmp_path: Path) -> None:
    """It names its class, and neither a limit (512 tokens) nor whether it normalises (not)."""
    folder = bare(save_model2vec(tmp_path / "model", kind))
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "seq_length": 1000000}
    (folder / "config.json").write_text(json.dumps(config))
    np.testing.assert_allclose(
        embed(folder), StaticModel.from_pretrained(folder).encode(INPUTS), atol=1e-5
    )
    assert bytetx.load(folder, device="cpu").max_tokens == 512


def save_static(folder: Path, *modules: torch.nn.Module, **options: object) -> Path:
    """A model of sentence-transformers that begins with StaticEmbedding."""
    static = StaticEmbedding(make_tokenizer("wordpiece"), embedding_dim=SIZE)
    for module in (static, *modules):
        randomize(module)
    model = SentenceTransformer(modules=[static, *modules], device="cpu", **options)
    model.save_pretrained(str(folder))
    return folder


def test_static_embedding_with_modules_and_prompts(tmp_path: Path) -> None:
    options = {"prompts": {"query": "find: "}, "truncate_dim": 10}
    folder = save_static(tmp_path / "model", Dense(SIZE, 16), Normalize(), **options)
    theirs = SentenceTransformer(str(folder), device="cpu")
    for given in ({}, {"prompt_name": "query"}, {"prompt": "fox "}):
        found = bytetx.load(folder, device="cpu").embed(INPUTS, **given).vectors
        np.testing.assert_allclose(found, theirs.encode(INPUTS, **given), atol=1e-5)


def test_static_embedding_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = save_static(tmp_path / "model")
    wanted = SentenceTransformer(str(folder), device="cpu").encode(INPUTS)
    inner = folder / "0_StaticEmbedding"
    inner.mkdir()
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).rename(inner / name)
    old = {"type": "sentence_transformers.models.StaticEmbedding", "path": inner.name}
    (folder / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", **old}]))
    np.testing.assert_allclose(embed(folder), wanted, atol=1e-5)


def test_tokenizer_files_beside_it_say_nothing(tmp_path: Path) -> None:
    """Both packages read tokenizer.json alone; its own truncation holds."""
    folder = save_static(tmp_path / "model")
    tokenizer = {"tokenizer_class": "BertTokenizer", "do_lower_case": False, "model_max_length": 3}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    limit = {"direction": "Left", "max_length": 7, "strategy": "LongestFirst", "stride": 0}
    edit_json(folder / "tokenizer.json", truncation=limit)
    wanted = SentenceTransformer(str(folder), device="cpu").encode(INPUTS)
    np.testing.assert_allclose(embed(folder), wanted, atol=1e-5)
    assert bytetx.load(folder, device="cpu").max_tokens == 7


def test_texts_that_model2vec_would_cut_are_errors(tmp_path: Path) -> None:
    """By their tokens, and by the characters of so many tokens."""
    model = bytetx.load(bare(save_model2vec(tmp_path / "model")), device="cpu")
    for text in ("fox dog " * LIMIT, "a" * 500):
        with pytest.raises(TooLongError, match=f"more than the {LIMIT} tokens"):
            model.embed(["fox", text])
        assert model.embed([text], truncate=True).stats.num_truncated == 1


def test_every_way_leaves_unknown_tokens_out(tmp_path: Path) -> None:
    """Streams, chunks, spans, precisions, and callers that share steps."""
    folder = bare(save_model2vec(tmp_path / "model"))
    model = bytetx.load(folder, device="cpu")
    inputs = [text for text in INPUTS if len(text) < 60]
    wanted = model.embed(inputs).vectors
    np.testing.assert_array_equal(np.stack(list(model.embed(iter(inputs), stream=True))), wanted)
    whole = [model.tokenizer.backend.encode(text).ids or text for text in inputs]
    np.testing.assert_array_equal(model.embed(whole).vectors, wanted)
    # One chunk each.
    chunked = model.embed(inputs, overflow="chunk").vectors
    np.testing.assert_allclose(chunked, wanted, atol=1e-6)
    spans = model.embed_spans(inputs[:3], [[(0, len(text))] for text in inputs[:3]])
    np.testing.assert_allclose(spans.vectors, wanted[:3], atol=1e-6)
    spans = model.embed_spans([f"fox {UNKNOWN} dog"], [[(0, 3), (4, 5), (6, 9)]])
    np.testing.assert_allclose(
        spans.vectors[[0, 2]], model.embed(["fox", "dog"]).vectors, atol=1e-6
    )
    assert not spans.vectors[1].any()
    given = [f"fox {UNKNOWN} dog", UNKNOWN]
    read = StaticModel.from_pretrained(folder).tokenize(given)
    assert [row.shape[1] for row in model.hidden_states(given)] == list(map(len, read))

    async def all_at_once() -> list[bytetx.tasks.results.Embeddings]:
        async with bytetx.AsyncModel(model) as served:
            return await asyncio.gather(*(served.embed([text]) for text in inputs))

    found = np.concatenate([result.vectors for result in asyncio.run(all_at_once())])
    np.testing.assert_array_equal(found, wanted)


def test_tokens_that_share_rows_share_memory(tmp_path: Path) -> None:
    plain = bytetx.load(save_model2vec(tmp_path / "plain"), device="cpu").info()
    mapped = bytetx.load(save_model2vec(tmp_path / "int8", weights="int8"), device="cpu").info()
    assert mapped["held_bytes"] < plain["held_bytes"] // 2
    assert mapped["vocab_size"] == plain["vocab_size"]
    assert plain["family"] == "static_embedding" and plain["num_layers"] == 0
    assert mapped["weights_formats"].keys() == {"I8", "F32"}


def test_static_queries_and_documents_of_a_transformer(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "bert")
    static = StaticEmbedding(make_tokenizer("wordpiece"), embedding_dim=48)
    randomize(static)
    router = Router.for_query_document(
        [static], [Transformer(str(base)), Pooling(48)], default_route="document"
    )
    model = SentenceTransformer(modules=[router, Normalize()], device="cpu")
    model.save_pretrained(str(tmp_path / "model"))
    found = bytetx.load(tmp_path / "model", device="cpu")
    for task, encode in (("query", model.encode_query), ("document", model.encode_document)):
        vectors = found.embed(SENTENCES, task=task, truncate=True).vectors
        np.testing.assert_allclose(vectors, encode(SENTENCES), atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mapping": torch.full((10,), 3)}, r"tensor 'weights' is F32 .* must be \[10\]"),
        ({"mapping": -1}, r"tensor 'mapping' names rows -1 to -1 of a table that has"),
        ({"mapping": 1 << 40}, r"tensor 'mapping' names rows .* of a table that has"),
        ({"embeddings": torch.ones(5)}, r"tensor 'embeddings' is F32 \[5\].* \[rows, size\]"),
        ({"embeddings": torch.ones(0, 4)}, r"'embeddings' is F32 \[0, 4\].* neither of them 0"),
        ({"embeddings": torch.ones(4, 0)}, r"'embeddings' is F32 \[4, 0\].* neither of them 0"),
        ({"mapping": torch.ones(0, dtype=torch.int64)}, r"'mapping' is I64 \[0\].* not 0"),
        ({"mapping": torch.tensor(3)}, r"'mapping' is I64 \[\].* must be \[tokens\]"),
        ({"embeddings": torch.full((9, 4), torch.nan)}, r"values that are not finite"),
        ({"weights": torch.ones(2)}, r"tensor 'weights' is F32 \[2\]"),
    ],
)
def test_damaged_tables(change: dict[str, object], message: str, tmp_path: Path) -> None:
    folder = bare(save_model2vec(tmp_path / "model", weights="mapped"))
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, value in change.items():
        if isinstance(value, int):
            value = torch.full_like(tensors[name], value)
        tensors[name] = value
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        bytetx.load(folder, device="cpu")


@pytest.mark.parametrize("of_model2vec", [True, False])
def test_a_vocabulary_without_tokens(of_model2vec: bool, tmp_path: Path) -> None:
    folder = save_model2vec(tmp_path / "model", "bpe")
    if of_model2vec:
        bare(folder)
    path = folder / "tokenizer.json"
    model = json.loads(path.read_text())["model"] | {"vocab": {}, "merges": [], "unk_token": None}
    edit_json(path, model=model, added_tokens=[], post_processor=None)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has a vocabulary without tokens"):
        bytetx.load(folder, device="cpu")


def test_what_it_cannot_do_is_named(tmp_path: Path) -> None:
    folder = save_static(tmp_path / "model")
    for options, message in (
        ({"dtype": "int8"}, "dtype int8 is of what layers multiply"),
        ({"tp": 2}, "no layers for tp to share"),
    ):
        with pytest.raises(OptionError, match=message):
            bytetx.load(folder, device="cpu", **options)
    model = bytetx.load(folder, device="cpu")
    with pytest.raises(InputError, match="StaticEmbedding"):
        model.classify(["a"])
    with pytest.raises(InputError, match="StaticEmbedding"):
        model.rerank("a", ["b"])
    with pytest.raises(InputError):
        model.generate(["a"])
    entry = {"idx": 1, "name": "1", "path": "1_Pooling"}
    entry["type"] = "sentence_transformers.models.Pooling"
    entries = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*entries, entry]))
    with pytest.raises(CheckpointError, match="Pooling cannot follow StaticEmbedding"):
        bytetx.load(folder, device="cpu")
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        bytetx.load(folder, device="cpu")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has no model\.safetensors"):
        bytetx.load(folder, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_a_gpu_gives_the_same_vectors(weights: str, tmp_path: Path) -> None:
    folder = bare(save_model2vec(tmp_path / "model", weights=weights))
    wanted = StaticModel.from_pretrained(folder).encode(INPUTS)
    for dtype, atol in (("float32", 1e-5), ("float16", 2e-3)):
        model = bytetx.load(folder, device="cuda", dtype=dtype)
        for _ in range(4):  # kernels one by one, and CUDA graphs of them
            found = model.embed(INPUTS, truncate=True).vectors
            np.testing.assert_allclose(found, wanted, atol=atol)
