"""similarity, semantic_search and maxsim against sentence-transformers' functions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import edit_json, save_checkpoint, save_sentence_model
from sentence_transformers import util
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.encode.request import RunStats
from bytetx.errors import OptionError
from bytetx.tasks import search
from bytetx.tasks.search import Match
from bytetx.tasks.vectors import (
    SparseEmbeddings,
    SparseVector,
    TokenEmbeddings,
    join_sparse,
    join_tokens,
)

THEIRS = {
    "cosine": util.cos_sim,
    "dot": util.dot_score,
    "euclidean": util.euclidean_sim,
    "manhattan": util.manhattan_sim,
}


def vectors(num_rows: int, dim: int = 24) -> np.ndarray:
    return torch.randn(num_rows, dim).numpy()


def sparse(num_rows: int, size: int = 50) -> SparseEmbeddings:
    rows = []
    for _ in range(num_rows):
        indices = torch.randperm(size)[: int(torch.randint(0, 9, (1,)))].sort().values
        rows.append(SparseVector(indices.int().numpy(), torch.rand(len(indices)).numpy()))
    return join_sparse(rows, size=size, stats=RunStats())


def tokens(lengths: list[int], dim: int = 24) -> TokenEmbeddings:
    empty = np.empty((0, dim), dtype=np.float32)
    return join_tokens([vectors(n, dim) for n in lengths], empty=empty, stats=RunStats())


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "_QUERY_ROWS": 3,
        "_CORPUS_ROWS": 7,
        "_DENSE_BYTES": 800,
    }.items():
        monkeypatch.setattr(search, name, value)
    monkeypatch.setitem(search._QUERY_TOKENS, "cpu", 10)
    monkeypatch.setitem(search._CORPUS_TOKENS, "cpu", 40)
    monkeypatch.setitem(search._PRODUCT_BYTES, "cpu", 1200)


@pytest.mark.parametrize("function", THEIRS)
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy, np.ndarray.tolist])
def test_similarity(function: str, kind: object, small_blocks: None) -> None:
    a, b = vectors(8), vectors(30)
    got = bytetx.similarity(kind(a), kind(b), function=function)
    assert got.dtype == torch.float32 and got.shape == (8, 30)
    torch.testing.assert_close(got, THEIRS[function](a, b), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("function", ["cosine", "dot", "euclidean"])
def test_sparse_similarity(function: str, small_blocks: None) -> None:
    a, b = sparse(9), sparse(20)
    got = bytetx.similarity(a, b, function=function)
    wanted = THEIRS[function](a.to_torch().to_dense(), b.to_torch().to_dense())
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.feature("Tasks", "MaxSim of token vectors")
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("query_lengths", [[4] * 9, [1, 5, 12, 3, 30, 2]])
def test_maxsim(mean: bool, query_lengths: list[int], small_blocks: None) -> None:
    queries, documents = tokens(query_lengths), tokens([3, 1, 80, 9, 17, 2, 2, 41, 5])
    got = bytetx.maxsim(queries, documents, mean=mean)
    wanted = (util.mean_maxsim if mean else util.maxsim)(list(queries), list(documents))
    torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-5)


def test_every_form_of_packed_vectors() -> None:
    queries, documents = tokens([4, 2]), tokens([3, 5, 1])
    wanted = bytetx.maxsim(queries, documents)
    pair = torch.from_numpy(documents.vectors), torch.from_numpy(documents.cu_seqlens).int()
    for form in (list(documents), pair, (documents.vectors, [0, 3, 8, 9])):
        torch.testing.assert_close(bytetx.maxsim(list(queries), form), wanted)
    half = bytetx.maxsim((torch.from_numpy(queries.vectors).half(), queries.cu_seqlens), documents)
    torch.testing.assert_close(half, wanted, atol=0.1, rtol=1e-2)
    assert half.dtype == torch.float32


def test_vectors_with_gradients() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    for scores in (bytetx.similarity(x, x), bytetx.maxsim((x, [0, 2, 6]), [x])):
        assert not scores.requires_grad
        scores += 1.0  # callers may change what they get
    found = bytetx.semantic_search(x, x, top_k=2)
    assert found.indices.shape == found.scores.shape == (6, 2)


def test_texts_without_vectors() -> None:
    got = bytetx.maxsim(tokens([2, 0, 3]), tokens([0, 4]))
    assert (got[:, 0] == -1e9).all() and got[1, 1] == 0
    assert bytetx.maxsim(tokens([2]), tokens([])).shape == (1, 0)
    assert bytetx.maxsim(tokens([]), tokens([2])).shape == (0, 1)
    assert bytetx.similarity(vectors(0), vectors(4)).shape == (0, 4)


def test_an_empty_list_is_no_vector() -> None:
    assert bytetx.similarity([], []).shape == (0, 0)
    assert bytetx.similarity([], vectors(4)).shape == (0, 4)
    assert bytetx.similarity(vectors(4)[0], vectors(3)).shape == (1, 3)
    assert bytetx.semantic_search([], vectors(4), top_k=3).indices.shape == (0, 3)


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">f8"])
def test_arrays_of_the_other_byte_order(dtype: str) -> None:
    given = vectors(3).astype(dtype)
    native = given.astype(given.dtype.newbyteorder("="))
    for a, b in ((given, native), (given[:, ::2], native[:, ::2])):
        torch.testing.assert_close(bytetx.similarity(a, a), bytetx.similarity(b, b))


@pytest.mark.parametrize("mean", [False, True])
def test_maxsim_where_no_query_has_a_vector(mean: bool) -> None:
    got = bytetx.maxsim(tokens([0, 0]), tokens([0, 4]), mean=mean)
    assert got.tolist() == [[-1e9, 0], [-1e9, 0]]
    function = "meanmaxsim" if mean else "maxsim"
    hits = bytetx.semantic_search(tokens([0]), tokens([0, 4]), function=function)
    assert hits.indices.tolist() == [[1, 0]]


@pytest.mark.feature("Tasks", "semantic search")
@pytest.mark.parametrize("function", ["cosine", "dot", "euclidean", "manhattan"])
@pytest.mark.parametrize("top_k", [1, 5, 100])
def test_semantic_search(function: str, top_k: int, small_blocks: None) -> None:
    a, b = vectors(8), vectors(30)
    got = bytetx.semantic_search(a, b, top_k=top_k, function=function)
    wanted = util.semantic_search(
        torch.from_numpy(a), torch.from_numpy(b), top_k=top_k, score_function=THEIRS[function]
    )
    assert got.indices.tolist() == [[hit["corpus_id"] for hit in hits] for hits in wanted]
    scores = [[hit["score"] for hit in hits] for hits in wanted]
    np.testing.assert_allclose(got.scores, scores, atol=1e-5)
    assert got[2][0] == Match(int(got.indices[2, 0]), float(got.scores[2, 0]))
    assert [hits[0].index for hits in got] == got.indices[:, 0].tolist() and len(got) == 8


@pytest.mark.parametrize("function", ["maxsim", "dot"])
def test_search_of_tokens_and_of_sparse_vectors(function: str, small_blocks: None) -> None:
    if function == "maxsim":
        queries, corpus = tokens([4, 7, 1]), tokens([3, 1, 80, 9, 17, 2, 2, 41, 5])
    else:
        queries, corpus = sparse(6), sparse(40)
    scores = bytetx.similarity(queries, corpus, function=function)
    got = bytetx.semantic_search(queries, corpus, top_k=4, function=function)
    np.testing.assert_allclose(got.scores, scores.topk(4, dim=1).values, rtol=1e-5, atol=1e-6)
    picked = scores.gather(1, torch.from_numpy(got.indices))
    np.testing.assert_allclose(got.scores, picked, rtol=1e-5, atol=1e-6)


def test_rows_of_failed_texts_come_last() -> None:
    corpus = vectors(6)
    corpus[2] = np.nan
    got = bytetx.semantic_search(vectors(3), corpus, top_k=6)
    assert got.indices[:, -1].tolist() == [2, 2, 2]
    assert np.isneginf(got.scores[:, -1]).all() and np.isfinite(got.scores[:, :-1]).all()


def test_no_more_rows_than_the_corpus_has() -> None:
    got = bytetx.semantic_search(vectors(2), vectors(0), top_k=3)
    assert got.indices.shape == (2, 0) and got[0] == []


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: bytetx.similarity(vectors(2), vectors(2), function="l2"), "function must be one"),
        (lambda: bytetx.similarity(vectors(2), vectors(2, 5)), "got 24 and 5"),
        (lambda: bytetx.similarity(vectors(2)[None], vectors(2)), r"must be \[n, dimensions\]"),
        (lambda: bytetx.similarity(np.zeros((2, 3), int), vectors(2, 3)), "floating numbers"),
        (lambda: bytetx.similarity([[1.0, 2.0], [3.0]], vectors(2)), "floating numbers: .*inhomo"),
        (lambda: bytetx.similarity(vectors(2), ["a", "b"]), "second vectors must be floating"),
        (lambda: bytetx.semantic_search(np.array(["a"]), vectors(2)), "must be floating numbers"),
        (lambda: bytetx.maxsim([["a"]], tokens([2])), "must be floating numbers"),
        (lambda: bytetx.similarity(sparse(2), vectors(2, 50)), "one side is dense"),
        (lambda: bytetx.similarity(sparse(2), sparse(2), function="manhattan"), "not for sparse"),
        (lambda: bytetx.similarity(tokens([2]), vectors(2)), "use function maxsim"),
        (lambda: bytetx.maxsim(vectors(2), tokens([2])), "must be TokenEmbeddings, a list"),
        (lambda: bytetx.maxsim([vectors(2), vectors(2, 5)], tokens([2])), "of one size"),
        (lambda: bytetx.maxsim((vectors(4), [0, 3]), tokens([2])), "cu_seqlens must rise from 0"),
        (lambda: bytetx.semantic_search(vectors(2), vectors(2), top_k=0), "top_k must be"),
    ],
)
def test_misuse(call: object, says: str) -> None:
    with pytest.raises(OptionError, match=says):
        call()


def test_the_function_of_the_checkpoint(tmp_path: Path) -> None:
    folder = save_sentence_model(tmp_path / "dense", [Pooling(48)])
    for name, wanted in ((None, "cosine"), ("dot", "dot"), ("manhattan", "manhattan")):
        edit_json(folder / "config_sentence_transformers.json", similarity_fn_name=name)
        model = bytetx.load(folder)
        assert model.similarity_function == wanted
        found = model.embed(["a text", "another one", "b"])
        torch.testing.assert_close(
            model.similarity(found, found.vectors),
            THEIRS[wanted](found.vectors, found.vectors),
            atol=1e-4,
            rtol=1e-4,
        )
    plain = save_checkpoint(tmp_path / "plain")
    assert bytetx.load(plain).similarity_function == "cosine"
