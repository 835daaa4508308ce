"""Every kind of vector, and answers, on a GPU against the same checkpoint on the CPU in float32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import SENTENCES, save_checkpoint, save_sentence_model, texts
from sentence_transformers.sentence_transformer.modules import Pooling
from test_embed_sparse import save_sparse
from test_embed_tokens import FIXED, save_multi_vector

import bytetx

pytestmark = pytest.mark.gpu

INPUTS = SENTENCES + texts(60, max_words=6)


def both(folder: Path) -> tuple[bytetx.Model, bytetx.Model]:
    """(on the GPU in float16, on the CPU in float32)"""
    on_gpu = bytetx.load(folder, device="cuda", dtype="float16", token_budget=200)
    return on_gpu, bytetx.load(folder, device="cpu")


@pytest.mark.parametrize("precision", ["float32", "float16", "int8", "uint8", "binary", "ubinary"])
def test_precision(precision: str, tmp_path: Path) -> None:
    on_gpu, exact = both(save_sentence_model(tmp_path, [Pooling(48, "mean")]))
    options = {"precision": precision, "truncate": True}
    if precision in ("int8", "uint8"):
        floats = exact.embed(INPUTS, truncate=True).vectors
        options["ranges"] = np.stack([floats.min(0), floats.max(0)])
    wanted = exact.embed(INPUTS, **options).vectors
    for _ in range(2):
        found = on_gpu.embed(INPUTS, **options).vectors
        assert found.dtype == wanted.dtype
        if "binary" in precision:
            bits = np.unpackbits(found.view(np.uint8) ^ wanted.view(np.uint8))
            assert bits.mean() < 0.01
        elif "int" in precision:
            distance = np.abs(found.astype(int) - wanted.astype(int))
            assert (np.minimum(distance, 256 - distance) <= 2).mean() > 0.99
        else:
            np.testing.assert_allclose(found, wanted, atol=2e-2)


def test_sparse(tmp_path: Path) -> None:
    on_gpu, exact = both(save_sparse(tmp_path))
    for _ in range(2):
        found = on_gpu.embed_sparse(INPUTS, truncate=True).to_scipy().toarray()
        wanted = exact.embed_sparse(INPUTS, truncate=True).to_scipy().toarray()
        np.testing.assert_allclose(found, wanted, atol=2e-2)


@pytest.mark.parametrize("attend", [True, False])
def test_multi_vector(attend: bool, tmp_path: Path) -> None:
    folder = save_multi_vector(tmp_path, query_expansion=FIXED | {"attend": attend})
    on_gpu, exact = both(folder)
    for _ in range(2):
        queries, documents = (
            [model.embed_tokens(INPUTS, task=task, truncate=True) for model in (on_gpu, exact)]
            for task in ("query", "document")
        )
        for found, wanted in (queries, documents):
            for ours, theirs in zip(found, wanted, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=3e-2)
    found, wanted = (
        bytetx.maxsim(query, document) for query, document in zip(queries, documents, strict=True)
    )
    assert torch.allclose(torch.as_tensor(found).cpu(), torch.as_tensor(wanted), atol=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_search_where_the_vectors_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, corpus = (torch.randn(n, 64, generator=generator) for n in (5, 3000))
    wanted = bytetx.semantic_search(queries, corpus, top_k=4)
    found = bytetx.semantic_search(queries.to("cuda", dtype), corpus.to("cuda", dtype), top_k=4)
    np.testing.assert_allclose(found.scores, wanted.scores, atol=2e-2)


def test_answers(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, head="ForQuestionAnswering", num_labels=2)
    on_gpu, exact = both(folder)
    pairs = [("Who met Zaphod?", text) for text in INPUTS if text]
    for _ in range(2):
        found, wanted = (model.answer(pairs, stride=4) for model in (on_gpu, exact))
        for ours, theirs in zip(found, wanted, strict=True):
            assert [a.score for a in ours] == pytest.approx([a.score for a in theirs], abs=2e-2)


@pytest.mark.parametrize("width", [384, 30522, 250002])
def test_pooled_maxima_of_a_vocabulary(width: int) -> None:
    from bytetx.ops.pooling import pool

    cu_seqlens = torch.tensor([0, 3, 3, 40, 41], dtype=torch.int32)
    rows = torch.randn(41, width).half()
    found = pool(rows.cuda(), cu_seqlens.cuda(), mode="max").cpu()
    wanted = pool(rows, cu_seqlens, mode="max")
    assert torch.equal(found, wanted)
