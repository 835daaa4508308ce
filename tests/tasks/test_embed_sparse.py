"""embed_sparse against sentence-transformers' SparseEncoder and BGE-M3's reduction."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from checkpoints import SENTENCES, edit_json, save_checkpoint, save_m3, texts
from cli_runs import Bytetx
from safetensors.torch import load_file
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import CheckpointError, InputError, OptionError
from bytetx.nn import splade
from bytetx.ops.linear import prepare_linear
from bytetx.tasks.vectors import SparseEmbeddings

INPUTS = SENTENCES + texts(20, max_words=5)
TOO_LONG = "word " * 100


def save_sparse(folder: Path, family: str = "bert", **options: object) -> Path:
    """A SparseEncoder on a random masked language model, saved. options: of SpladePooling."""
    mlm = save_checkpoint(folder / "mlm", family, head="ForMaskedLM")
    modules = [Transformer(str(mlm), transformer_task="fill-mask"), SpladePooling(**options)]
    prompts = {"query": "the query: ", "document": ""}
    model = SparseEncoder(modules=modules, device="cpu", prompts=prompts)
    model.save_pretrained(str(folder / "sparse"))
    return folder / "sparse"


def dense(embeddings: SparseEmbeddings) -> np.ndarray:
    return embeddings.to_scipy().toarray()


def theirs(folder: Path, given: list[str], **options: object) -> np.ndarray:
    return SparseEncoder(str(folder), device="cpu").encode(given, **options).to_dense().numpy()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_sparse(tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def model(folder: Path) -> bytetx.Model:
    return bytetx.load(folder)


@pytest.mark.feature("Tasks", "`embed_sparse`: SPLADE and other sparse encoders")
@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "mpnet"])
def test_weights_are_those_of_sparse_encoder(family: str, tmp_path: Path) -> None:
    folder = save_sparse(tmp_path, family)
    got = bytetx.load(folder).embed_sparse(INPUTS, truncate=True)
    np.testing.assert_allclose(dense(got), theirs(folder, INPUTS), atol=1e-4)
    assert (got.values > 0).all() and got.values.dtype == np.float32
    assert got.indices.dtype == np.int32 and got.indptr[-1] == len(got.indices)


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_every_pooling(strategy: str, activation: str, tmp_path: Path) -> None:
    folder = save_sparse(tmp_path, pooling_strategy=strategy, activation_function=activation)
    got = bytetx.load(folder).embed_sparse(INPUTS, truncate=True)
    np.testing.assert_allclose(dense(got), theirs(folder, INPUTS), atol=1e-4, rtol=1e-5)


def test_a_plain_masked_language_model(tmp_path: Path) -> None:
    """As SparseEncoder takes a checkpoint that names no modules."""
    folder = save_checkpoint(tmp_path, head="ForMaskedLM")
    got = bytetx.load(folder).embed_sparse(INPUTS, truncate=True)
    np.testing.assert_allclose(dense(got), theirs(folder, INPUTS), atol=1e-4)


def test_the_layout_before_version_5_4(tmp_path: Path) -> None:
    old = save_sparse(tmp_path, pooling_strategy="sum")
    modules = json.loads((old / "modules.json").read_text())
    modules[0]["type"] = "sentence_transformers.sparse_encoder.models.MLMTransformer"
    modules[1]["type"] = "sentence_transformers.sparse_encoder.models.SpladePooling"
    (old / "modules.json").write_text(json.dumps(modules))
    got = bytetx.load(old).embed_sparse(INPUTS, truncate=True)
    np.testing.assert_allclose(dense(got), theirs(old, INPUTS), atol=1e-4)


@pytest.mark.parametrize("most", [1, 7, 10_000])
def test_max_active_dims(model: bytetx.Model, folder: Path, most: int) -> None:
    got = model.embed_sparse(INPUTS, truncate=True, max_active_dims=most)
    np.testing.assert_allclose(dense(got), theirs(folder, INPUTS, max_active_dims=most), atol=1e-4)
    assert np.diff(got.indptr).max() <= most


def test_the_number_of_weights_that_the_checkpoint_says(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path)
    edit_json(folder / "config_sentence_transformers.json", max_active_dims=5)
    got = bytetx.load(folder).embed_sparse(INPUTS, truncate=True)
    assert np.diff(got.indptr).max() == 5
    np.testing.assert_allclose(dense(got), theirs(folder, INPUTS), atol=1e-4)


def test_prompts(model: bytetx.Model, folder: Path) -> None:
    short = INPUTS[-8:]
    got = dense(model.embed_sparse(short, prompt_name="query", truncate=True))
    encoder = SparseEncoder(str(folder), device="cpu")
    np.testing.assert_allclose(got, encoder.encode_query(short).to_dense().numpy(), atol=1e-4)
    again = dense(model.embed_sparse(short, prompt="the query: ", truncate=True))
    np.testing.assert_array_equal(got, again)


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("block_rows", [1, 3, 64, 4096])
def test_blocks_change_no_bit(
    strategy: str, block_rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts alone, in any company and cut into blocks of any size have the same weights."""
    model = bytetx.load(save_sparse(tmp_path, pooling_strategy=strategy))
    monkeypatch.setattr(splade, "_MIN_BLOCK_ROWS", block_rows)
    monkeypatch.setitem(splade._BLOCK_BYTES, "cpu", 1)
    together = model.embed_sparse(INPUTS, truncate=True)
    for index in (0, 2, 7, 15):
        alone = model.embed_sparse([INPUTS[index]], truncate=True)
        np.testing.assert_array_equal(alone.indices, together[index].indices)
        np.testing.assert_array_equal(alone.values, together[index].values)
    order = np.random.default_rng(0).permutation(len(INPUTS))
    shuffled = model.embed_sparse([INPUTS[i] for i in order], truncate=True)
    np.testing.assert_array_equal(dense(shuffled), dense(together)[order])
    if strategy == "max":
        monkeypatch.undo()
        np.testing.assert_array_equal(
            dense(together), dense(model.embed_sparse(INPUTS, truncate=True))
        )


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("most", [None, 7])
def test_a_padded_vocabulary_changes_nothing(
    strategy: str, most: int | None, tmp_path: Path
) -> None:
    """As on a GPU, where the added tokens never have a weight."""
    model = bytetx.load(save_sparse(tmp_path, pooling_strategy=strategy))
    wanted = model.embed_sparse(INPUTS, truncate=True, max_active_dims=most)
    head = model.heads.masked_lm
    assert head is not None
    weight = head.decoder.weight.to_dense() if head.decoder.is_prepacked else head.decoder.weight
    plain = prepare_linear(weight, head.decoder.bias, prepack=False)
    head = splade.pad_vocabulary(replace(head, decoder=plain))
    assert head.decoder.n % 64 == 0 and head.decoder.n > model.spec.vocab_size
    model.__dict__["_splade_head"] = head
    got = model.embed_sparse(INPUTS, truncate=True, max_active_dims=most)
    np.testing.assert_array_equal(got.indices, wanted.indices)
    np.testing.assert_array_equal(got.indptr, wanted.indptr)
    np.testing.assert_allclose(got.values, wanted.values, atol=1e-5)


def test_the_form_of_the_result(model: bytetx.Model) -> None:
    got = model.embed_sparse(INPUTS, truncate=True)
    matrix = dense(got)
    assert got.shape == matrix.shape == (len(INPUTS), model.spec.vocab_size) and len(got) == len(
        INPUTS
    )
    np.testing.assert_array_equal(got.to_torch().to_dense().numpy(), matrix)
    for row, vector in zip(matrix, got, strict=True):
        np.testing.assert_array_equal(np.flatnonzero(row), vector.indices)
        np.testing.assert_array_equal(row[vector.indices], vector.values)
        assert len(vector) == len(vector.indices)
    np.testing.assert_array_equal(got[-1].values, got[len(INPUTS) - 1].values)
    with pytest.raises(IndexError):
        got[len(INPUTS)]
    none = model.embed_sparse([])
    assert none.shape == (0, model.spec.vocab_size) and none.to_scipy().nnz == 0


def test_streams_and_errors(model: bytetx.Model) -> None:
    given = [*INPUTS[5:7], TOO_LONG, "x"]

    def read() -> Iterator[str]:
        yield from given

    whole = model.embed_sparse(read(), on_error="return")
    assert list(whole.errors) == [2] and len(whole[2]) == 0
    for got, wanted in zip(
        model.embed_sparse(read(), on_error="return", stream=True), whole, strict=True
    ):
        if isinstance(got, InputError):
            continue
        np.testing.assert_array_equal(got.indices, wanted.indices)
        np.testing.assert_array_equal(got.values, wanted.values)
    with pytest.raises(InputError, match="more than the 40 tokens"):
        model.embed_sparse(given)


def test_what_gives_no_sparse_vectors(tmp_path: Path, model: bytetx.Model) -> None:
    with pytest.raises(InputError, match="gives no sparse vectors"):
        bytetx.load(save_checkpoint(tmp_path)).embed_sparse(["a"])
    with pytest.raises(InputError, match="is a sparse encoder"):
        model.embed(["a"])
    assert model.embed(["a"], pooling="cls").shape == (1, 48)
    with pytest.raises(OptionError, match="max_active_dims must be a positive integer"):
        model.embed_sparse(["a"], max_active_dims=0)


def m3_weights(model: bytetx.Model, layer: dict, text: str) -> dict[int, float]:
    """FlagEmbedding's reduction, from the hidden states of one text."""
    tokenizer = model.tokenizer
    token_ids = tokenizer.backend.encode(text).ids
    states = torch.from_numpy(model.hidden_states([text])[0][0])
    weights = torch.relu(states @ layer["weight"].T + layer.get("bias", 0.0))[:, 0].tolist()
    best: dict[int, float] = {}
    for token_id, weight in zip(token_ids, weights, strict=True):
        if token_id not in {tokenizer.unk_token_id, *tokenizer.frame_ids} and weight > 0:
            best[token_id] = max(weight, best.get(token_id, 0.0))
    return best


@pytest.mark.parametrize(("suffix", "bias"), [(".pt", True), (".safetensors", False)])
def test_token_weights_of_m3(suffix: str, bias: bool, tmp_path: Path) -> None:
    folder = save_m3(tmp_path, suffix=suffix, bias=bias)
    path = folder / f"sparse_linear{suffix}"
    layer = torch.load(path) if suffix == ".pt" else load_file(path)
    model = bytetx.load(folder)
    given = [*SENTENCES[6:], *texts(10, max_words=3), "new new new york new", "日本語 new"]
    got = model.embed_sparse(given)
    for text, vector in zip(given, got, strict=True):
        wanted = m3_weights(model, layer, text)
        assert vector.indices.tolist() == sorted(wanted)
        np.testing.assert_allclose(vector.values, [wanted[i] for i in sorted(wanted)], atol=1e-4)
    few = model.embed_sparse(given, max_active_dims=2)
    for whole, vector in zip(got, few, strict=True):
        assert sorted(whole.values)[-2:] == sorted(vector.values)
        assert set(vector.indices.tolist()) <= set(whole.indices.tolist())


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"weight": torch.zeros(2, 48)}, r"weight must be floating \(1, 48\)"),
        ({"weight": torch.full((1, 48), torch.nan)}, "not finite"),
        ({"weight": torch.zeros(1, 48), "bias": torch.zeros(3)}, "bias must be floating"),
        ({"other": torch.zeros(1, 48)}, "must hold weight and bias"),
        ([1, 2], "must hold a state_dict, got list"),
    ],
)
def test_damaged_layers(tensors: object, says: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path)
    torch.save(tensors, folder / "sparse_linear.pt")
    with pytest.raises(CheckpointError, match=says):
        bytetx.load(folder)
    (folder / "sparse_linear.pt").write_bytes(b"no zip")
    with pytest.raises(CheckpointError, match="cannot be read as plain tensors"):
        bytetx.load(folder)


def test_command_line(folder: Path, model: bytetx.Model, bytetx: Bytetx, tmp_path: Path) -> None:
    given = [*texts(20, max_words=4), TOO_LONG]
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in given))
    for name in ("s.jsonl", "s.parquet"):
        ran = bytetx("embed-sparse", "a.jsonl", "-m", folder, "-o", name, "--max-active-dims", 9)
        assert ran.code == 0 and "1 error" in ran.err
    printed = [json.loads(line) for line in Path("s.jsonl").read_text().splitlines()]
    table = pq.read_table("s.parquet")
    assert "error" in printed[-1] and table.column("indices")[-1].as_py() is None
    wanted = model.embed_sparse(given[:-1], max_active_dims=9)
    rows = zip(wanted, printed[:-1], table.to_pylist()[:-1], strict=True)
    for vector, *files in rows:
        for row in files:
            assert row["indices"] == vector.indices.tolist()
            np.testing.assert_array_equal(np.float32(row["values"]), vector.values)
    ran = bytetx("embed-sparse", "a.jsonl", "-m", folder, "-o", "s.npy")
    assert ran.code == 2 and ".npy holds vectors" in ran.err
