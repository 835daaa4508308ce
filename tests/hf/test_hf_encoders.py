"""wrap of sentence-transformers' sparse and multi-vector encoders: the same vectors, packed."""

import copy
import string
import warnings
from pathlib import Path

import numpy as np
import pytest
from checkpoints import SENTENCES, save_checkpoint, texts
from sentence_transformers import MultiVectorEncoder, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tiny import one_thread, randomize  # noqa: F401  (a fixture)
from torch import nn

import bytetx
from bytetx.hf.forward import PackedForward

INPUTS = SENTENCES + texts(12, max_words=5)


@pytest.mark.parametrize("attend", [True, False])
@pytest.mark.parametrize("strategy", ["fixed", "min"])
def test_multi_vector_queries_and_documents(strategy: str, attend: bool, tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base")
    dense = Dense(48, 20, activation_function=nn.Identity(), module_input_name="token_embeddings")
    randomize(dense)
    expansion = {"strategy": strategy, "attend": attend, "length": 24}
    modules = [
        Transformer(str(base), query_expansion=expansion),
        dense,
        MultiVectorMask(skiplist_words=list(string.punctuation)),
        Normalize(module_input_name="token_embeddings"),
    ]
    stock = MultiVectorEncoder(modules=modules, device="cpu")
    wrapped = bytetx.wrap(copy.deepcopy(stock))
    passes = count_packed(wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for encode in ("encode_query", "encode_document"):
            wanted = getattr(stock, encode)(INPUTS, convert_to_numpy=True)
            found = getattr(wrapped, encode)(INPUTS, convert_to_numpy=True)
            for ours, theirs in zip(found, wanted, strict=True):
                np.testing.assert_allclose(ours, theirs, atol=1e-4)
    assert passes  # documents, at least, run packed
    assert bytetx.unwrap(wrapped) is wrapped
    assert all("forward" not in module.__dict__ for module in wrapped.modules())


def test_splade(tmp_path: Path) -> None:
    base = save_checkpoint(tmp_path / "base", head="ForMaskedLM")
    modules = [Transformer(str(base), transformer_task="fill-mask"), SpladePooling()]
    stock = SparseEncoder(modules=modules, device="cpu")
    wrapped = bytetx.wrap(copy.deepcopy(stock))
    passes = count_packed(wrapped)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, wanted = (model.encode(INPUTS).to_dense().numpy() for model in (wrapped, stock))
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    assert passes


def count_packed(model: nn.Module) -> list[object]:
    """A list that gets an entry for each packed pass of the wrapped model."""
    passes: list[object] = []
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, PackedForward):
            run = forward._pass

            def counted(*args: object, run: object = run) -> object:
                passes.append(args)
                return run(*args)

            forward._pass = counted
    return passes
