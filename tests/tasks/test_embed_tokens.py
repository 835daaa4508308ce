"""embed_tokens against sentence-transformers' MultiVectorEncoder, in each layout that it reads."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import (
    SENTENCES,
    edit_json,
    save_checkpoint,
    save_sentence_model,
    texts,
)
from cli_runs import Bytetx
from multi_vectors import save_multi_vector
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Normalize
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import quantize_embeddings
from tiny import one_thread, randomize  # noqa: F401  (autouse)
from torch import nn

import bytetx
from bytetx.errors import CheckpointError, InputError, OptionError, TooLongError
from bytetx.tasks.vectors import TokenEmbeddings

INPUTS = SENTENCES + texts(20, max_words=5)
TOO_LONG = "word " * 100
FIXED = {"strategy": "fixed", "attend": False, "length": 24}


def assert_same(got: TokenEmbeddings, wanted: list[np.ndarray], *, atol: float = 1e-4) -> None:
    assert [len(matrix) for matrix in got] == [len(matrix) for matrix in wanted]
    for ours, theirs in zip(got, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol)


def assert_same_model(folder: Path) -> None:
    """Queries and documents, cut where they are too long."""
    ours, theirs = bytetx.load(folder), MultiVectorEncoder(str(folder), device="cpu")
    queries = theirs.encode_query(INPUTS, convert_to_numpy=True)
    assert_same(ours.embed_tokens(INPUTS, task="query", truncate=True), queries)
    documents = theirs.encode_document(INPUTS, convert_to_numpy=True)
    assert_same(ours.embed_tokens(INPUTS, truncate=True), documents)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("multi-vector")
    return save_multi_vector(folder, document_length=20, query_expansion=FIXED)


@pytest.fixture(scope="module")
def model(folder: Path) -> bytetx.Model:
    return bytetx.load(folder)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert"])
@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_query_expansion(family: str, attend: bool, strategy: str, tmp_path: Path) -> None:
    expansion = {"strategy": strategy, "attend": attend, "length": 24}
    assert_same_model(save_multi_vector(tmp_path, family, query_expansion=expansion))


@pytest.mark.parametrize("length", [5, 30])
def test_lengths_and_no_expansion(length: int, tmp_path: Path) -> None:
    options = {"query_length": length, "document_length": length + 3}
    assert_same_model(save_multi_vector(tmp_path, "mpnet", **options))


def test_another_token_of_expansion_and_a_ceiling(tmp_path: Path) -> None:
    expansion = {"strategy": "min", "attend": False, "length": 12, "token": "[SEP]"}
    skips = ["query", "document"]
    folder = save_multi_vector(tmp_path, skips=skips, query_length=15, query_expansion=expansion)
    assert_same_model(folder)


def test_a_longer_expansion_than_text(tmp_path: Path) -> None:
    """One token with its two special ones is expanded tenfold."""
    expansion = {"strategy": "fixed", "attend": False, "length": 40}
    assert_same_model(save_multi_vector(tmp_path, query_expansion=expansion))


def test_a_causal_trunk(tmp_path: Path) -> None:
    """As LFM2-ColBERT's: a causal trunk without attention in most layers, and a projection."""
    assert_same_model(save_multi_vector(tmp_path, "lfm2", query_length=15, document_length=20))


@pytest.mark.feature("Tasks", "`embed_tokens`: late interaction (ColBERT)")
def test_pylate(tmp_path: Path) -> None:
    """Two modules, keys of its own, and prefixes that are one token each."""
    folder = save_multi_vector(tmp_path)
    for name in ("2_MultiVectorMask", "3_Normalize"):
        (folder / name / "config.json").unlink()
        (folder / name).rmdir()
    modules = json.loads((folder / "modules.json").read_text())[:2]
    modules[0]["type"] = "sentence_transformers.models.Transformer"
    modules[1]["type"] = "pylate.models.Dense.Dense"
    (folder / "modules.json").write_text(json.dumps(modules))
    dense = json.loads((folder / "1_Dense" / "config.json").read_text())
    del dense["module_input_name"], dense["module_output_name"]
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense))
    edit_json(folder / "sentence_bert_config.json", query_expansion=None)
    own = json.loads((folder / "sentence_bert_config.json").read_text())
    del own["query_expansion"]
    (folder / "sentence_bert_config.json").write_text(json.dumps(own))
    edit_json(
        folder / "config_sentence_transformers.json",
        model_type="ColBERT",
        prompts={"query": "", "document": ""},
        query_prefix="[MASK] ",
        document_prefix="the ",
        query_length=18,
        document_length=22,
        attend_to_expansion_tokens=False,
    )
    assert_same_model(folder)
    edit_json(
        folder / "config_sentence_transformers.json",
        attend_to_expansion_tokens=True,
        skiplist_words=["the", "."],
    )
    assert_same_model(folder)
    edit_json(folder / "config_sentence_transformers.json", do_query_expansion=False)
    assert_same_model(folder)


def test_stanford(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    edit_json(folder / "config.json", architectures=["HF_ColBERT"])
    tensors = load_file(folder / "model.safetensors")
    tensors = {f"bert.{name}": tensor for name, tensor in tensors.items()}
    tensors["linear.weight"] = torch.randn(16, 48)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    metadata = {"query_token_id": "[MASK]", "doc_token_id": "the", "query_maxlen": 20}
    (folder / "artifact.metadata").write_text(json.dumps(metadata | {"doc_maxlen": 25}))
    assert_same_model(folder)
    (folder / "artifact.metadata").write_text(json.dumps(metadata | {"mask_punctuation": False}))
    assert_same_model(folder)
    assert "linear.weight" not in bytetx.load(folder).checkpoint.unused_tensors


def test_company_changes_no_bit(model: bytetx.Model) -> None:
    for task in ("query", "document"):
        together = model.embed_tokens(INPUTS, task=task, truncate=True)
        for index in (0, 2, 6, 7, 15):
            alone = model.embed_tokens([INPUTS[index]], task=task, truncate=True)
            np.testing.assert_array_equal(alone[0], together[index])
        order = np.random.default_rng(0).permutation(len(INPUTS))
        shuffled = model.embed_tokens([INPUTS[i] for i in order], task=task, truncate=True)
        for place, index in enumerate(order):
            np.testing.assert_array_equal(shuffled[place], together[int(index)])


def test_the_form_of_the_result(model: bytetx.Model) -> None:
    got = model.embed_tokens(INPUTS, task="query", truncate=True)
    assert got.vectors.shape == (24 * len(INPUTS), 20) and got.vectors.dtype == np.float32
    np.testing.assert_array_equal(got.cu_seqlens, 24 * np.arange(len(INPUTS) + 1))
    np.testing.assert_allclose(np.linalg.norm(got.vectors, axis=1), 1, atol=1e-5)
    streamed = list(model.embed_tokens(iter(INPUTS), task="query", truncate=True, stream=True))
    np.testing.assert_array_equal(np.concatenate(streamed), got.vectors)
    none = model.embed_tokens([])
    assert none.vectors.shape == (0, 20) and len(none) == 0
    with pytest.raises(IndexError):
        none[0]


def test_token_ids_are_cut_and_expanded_too(model: bytetx.Model) -> None:
    prompt = "the query: "
    ids = [model.tokenizer.limited(24).backend.encode(prompt + text).ids for text in INPUTS]
    given = model.embed_tokens(ids, task="query")
    wanted = model.embed_tokens(INPUTS, task="query", truncate=True)
    np.testing.assert_array_equal(given.vectors, wanted.vectors)
    with pytest.raises(TooLongError, match="the model takes at most 24"):
        model.embed_tokens([[5] * 25], task="query")
    assert len(model.embed_tokens([[5] * 25], task="query", truncate=True)[0]) == 24


def test_errors_of_texts(model: bytetx.Model) -> None:
    with pytest.raises(TooLongError, match="more than the 24 tokens"):
        model.embed_tokens(["x", TOO_LONG], task="query")
    got = model.embed_tokens(["x", TOO_LONG, "y"], on_error="return")
    assert list(got.errors) == [1] and len(got[1]) == 0
    np.testing.assert_array_equal(got[2], model.embed_tokens(["y"])[0])


@pytest.mark.parametrize("precision", ["float16", "int8", "uint8", "binary", "ubinary"])
def test_precision(model: bytetx.Model, precision: str) -> None:
    floats = model.embed_tokens(INPUTS, truncate=True).vectors
    ranges = np.stack([floats.min(axis=0), floats.max(axis=0)])
    options = {"ranges": ranges} if "int8" in precision else {}
    got = model.embed_tokens(INPUTS, truncate=True, precision=precision, **options).vectors
    wanted = floats.astype(np.float16)
    if precision != "float16":
        wanted = quantize_embeddings(floats, precision, **options)
    np.testing.assert_array_equal(got, wanted)


def test_options(model: bytetx.Model, tmp_path: Path) -> None:
    raw = model.embed_tokens(["a text"], normalize=False)[0]
    unit = model.embed_tokens(["a text"], normalize=True)[0]
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), unit, atol=1e-5)
    named = model.embed_tokens(["a text"], prompt_name="query")[0]
    given = model.embed_tokens(["a text"], prompt="the query: ")[0]
    np.testing.assert_array_equal(named, given)
    with pytest.raises(OptionError, match="task must be 'query' or 'document'"):
        model.embed_tokens(["a"], task="passage")
    with pytest.raises(OptionError, match="needs ranges"):
        model.embed_tokens(["a"], precision="int8")
    with pytest.raises(InputError, match="gives no vectors of tokens"):
        bytetx.load(save_checkpoint(tmp_path)).embed_tokens(["a"])
    with pytest.raises(InputError, match="is a multi-vector model"):
        model.embed(["a"])
    assert model.embed(["a"], pooling="mean").shape == (1, 48)


def test_unseen_tokens_need_attention_without_positions(tmp_path: Path) -> None:
    folder = save_multi_vector(tmp_path, "mpnet", query_expansion=FIXED)
    model = bytetx.load(folder)
    assert len(model.embed_tokens(["a"])) == 1
    with pytest.raises(InputError, match="does not run for a model with a relative attention bias"):
        model.embed_tokens(["a"], task="query")


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("sentence_bert_config.json", {"query_expansion": {"strategy": "max"}}, "strategy must be"),
        ("sentence_bert_config.json", {"query_expansion": {"attend": True}}, "lacks its length"),
        ("sentence_bert_config.json", {"query_length": 0}, "query_length must be"),
        ("2_MultiVectorMask/config.json", {"keep_only_token_ids": [3]}, "tokens of images only"),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, "is not supported"),
    ],
)
def test_damaged_files(name: str, change: dict, says: str, tmp_path: Path) -> None:
    folder = save_multi_vector(tmp_path, query_expansion=FIXED)
    edit_json(folder / name, **change)
    with pytest.raises(CheckpointError, match=says):
        bytetx.load(folder)


def test_an_unknown_module_is_refused(tmp_path: Path) -> None:
    folder = save_multi_vector(tmp_path)
    modules = json.loads((folder / "modules.json").read_text())
    modules[2]["type"] = "pylate.models.Other"
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="'pylate.models.Other' of a multi-vector model"):
        bytetx.load(folder)


def test_an_expansion_beyond_the_positions(tmp_path: Path) -> None:
    folder = save_multi_vector(tmp_path, query_expansion=FIXED | {"length": 39})
    edit_json(folder / "sentence_bert_config.json", query_expansion=FIXED | {"length": 41})
    with pytest.raises(InputError, match="expands queries to 41 tokens"):
        bytetx.load(folder).embed_tokens(["a"], task="query")


def test_m3(tmp_path: Path) -> None:
    """FlagEmbedding projects all tokens but the first one, and normalises."""
    folder = save_checkpoint(tmp_path, "xlm-roberta")
    layer = {"weight": torch.randn(20, 48), "bias": torch.randn(20)}
    torch.save(layer, folder / "colbert_linear.pt")
    model = bytetx.load(folder)
    given = [*SENTENCES[6:], *texts(10, max_words=3)]
    wanted = []
    for states in model.hidden_states(given):
        projected = torch.from_numpy(states[0][1:]) @ layer["weight"].T + layer["bias"]
        wanted.append(nn.functional.normalize(projected, dim=-1).numpy())
    assert_same(model.embed_tokens(given), wanted)


@pytest.mark.feature("Tasks", "dense, sparse and token vectors from one pass")
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_all_three_kinds_of_m3_from_one_pass(suffix: str, tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path, [Pooling(48, "cls"), Normalize()], family="xlm-roberta")
    for name, rows in (("sparse_linear", 1), ("colbert_linear", 20)):
        layer = {"weight": torch.randn(rows, 48), "bias": torch.randn(rows)}
        save = torch.save if suffix == ".pt" else save_file
        save(layer, folder / f"{name}{suffix}")
    model = bytetx.load(folder)
    given = [*SENTENCES[6:], *texts(30, max_words=3), TOO_LONG]
    passes = []
    run = model.transformer.forward
    model.transformer.forward = lambda *a, **k: passes.append(a[0].total_tokens) or run(*a, **k)
    got = model.embed_all(given, on_error="return")
    assert sum(passes) == got.stats.num_tokens  # no token runs twice
    np.testing.assert_array_equal(got.dense.vectors, model.embed(given, on_error="return").vectors)
    sparse = model.embed_sparse(given, on_error="return")
    for name in ("indices", "values", "indptr"):
        np.testing.assert_array_equal(getattr(got.sparse, name), getattr(sparse, name))
    tokens = model.embed_tokens(given, on_error="return")
    np.testing.assert_array_equal(got.tokens.vectors, tokens.vectors)
    np.testing.assert_array_equal(got.tokens.cu_seqlens, tokens.cu_seqlens)
    last = len(given) - 1
    assert list(got.errors) == [last] == list(got.dense.errors) == list(got.tokens.errors)


def test_what_gives_not_all_three_kinds(model: bytetx.Model, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="use embed_tokens with this model"):
        model.embed_all(["a"])
    with pytest.raises(InputError, match="gives no sparse vectors"):
        bytetx.load(save_checkpoint(tmp_path)).embed_all(["a"])


def test_command_line(model: bytetx.Model, folder: Path, bytetx: Bytetx, tmp_path: Path) -> None:
    given = ["", "a", *texts(18, max_words=1), TOO_LONG]
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    np.save("sample.npy", model.embed_tokens(given[:9]).vectors)
    cases = [
        ("float32", "jsonl", []),
        ("float32", "parquet", ["--task", "query"]),
        ("float16", "parquet", []),
        ("ubinary", "jsonl", ["--task", "query"]),
        ("int8", "parquet", ["--ranges", "sample.npy"]),
    ]
    for precision, suffix, more in cases:
        name = f"{precision}.{suffix}"
        ran = bytetx(
            *("embed-tokens", "a.jsonl", "-m", folder, "-o", name, "--precision", precision), *more
        )
        assert ran.code == 0 and "1 error" in ran.err
        options: dict = {"task": "query" if "query" in more else "document"}
        if suffix == "jsonl":
            rows = [json.loads(line) for line in Path(name).read_text().splitlines()]
        else:
            rows = pq.read_table(name).to_pylist()
        if precision == "int8":
            sample = np.load("sample.npy")
            options["ranges"] = np.stack([sample.min(0), sample.max(0)])
        wanted = model.embed_tokens(given[:-1], precision=precision, **options)
        for row, vectors in zip(rows[:-1], wanted, strict=True):
            found = np.array(row["embeddings"], dtype=vectors.dtype).reshape(vectors.shape)
            np.testing.assert_array_equal(found, vectors)
        assert rows[-1]["error"] and rows[-1].get("embeddings") is None
    ran = bytetx("embed-tokens", "a.jsonl", "-m", folder, "-o", "t.npy")
    assert ran.code == 2 and ".npy holds vectors" in ran.err
    ran = bytetx("embed-tokens", "a.jsonl", "-m", folder, "--task", "both")
    assert ran.code == 2 and "--task must be query or document, got 'both'" in ran.err
