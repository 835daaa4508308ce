"""Sparse vectors of causal trunks, with and without the mask, as SparseEncoder gives them."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SENTENCES, edit_json, save_causal, texts
from sentence_transformers import SparseEncoder
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sparse_encoder.modules import SpladePooling
from tiny import one_thread  # noqa: F401  (autouse)

import bytetx
from bytetx.errors import CheckpointError, InputError
from bytetx.hf import FallbackWarning

INPUTS = [text for text in SENTENCES + texts(20, max_words=12) if text]
# How sentence-transformers reads the logits of all tokens from a causal model's class.
ALL_LOGITS = {
    "transformer_task": "text-generation",
    "processing_kwargs": {"text": {"logits_to_keep": 0}},
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "token_embeddings",
}
PROMPTS = {"query": "the query: ", "document": ""}


def save_sparse(
    folder: Path,
    name: str = "qwen3",
    *,
    pooling: dict[str, object] | None = None,
    settings: dict[str, object] = ALL_LOGITS,
    **config: object,
) -> Path:
    trunk = save_causal(folder / "trunk", name, **({"pad_token_id": 1} | config))
    modules = [Transformer(str(trunk), **settings), SpladePooling(**pooling or {})]
    SparseEncoder(modules=modules, device="cpu", prompts=PROMPTS).save_pretrained(
        str(folder / "sparse")
    )
    return folder / "sparse"


def theirs(folder: Path, **options: object) -> np.ndarray:
    return SparseEncoder(str(folder), device="cpu").encode(INPUTS, **options).to_dense().numpy()


def ours(folder: Path, **options: object) -> np.ndarray:
    model = bytetx.load(folder, device="cpu", dtype=options.pop("dtype", "float32"))
    return model.embed_sparse(INPUTS, **options).to_scipy().toarray()


@pytest.mark.feature("Tasks", "`embed_sparse` by causal trunks (SPLADE)")
@pytest.mark.parametrize(
    ("name", "is_causal"),
    [
        *((name, True) for name in ("qwen3", "llama", "mistral", "opt-post", "gptj")),
        *((name, False) for name in ("qwen3", "llama", "mistral")),
    ],
)
def test_weights_are_those_of_sparse_encoder(name: str, is_causal: bool, tmp_path: Path) -> None:
    config = {} if is_causal else {"is_causal": False}
    folder = save_sparse(tmp_path, name, **config)
    wanted = theirs(folder)
    np.testing.assert_allclose(ours(folder), wanted, atol=1e-4)
    np.testing.assert_allclose(
        ours(folder, prompt_name="query"), theirs(folder, prompt_name="query"), atol=1e-4
    )
    alone = [
        bytetx.load(folder, device="cpu").embed_sparse([text]).to_scipy().toarray()[0]
        for text in INPUTS[:3]
    ]
    np.testing.assert_allclose(np.stack(alone), wanted[:3], atol=1e-4)


@pytest.mark.parametrize("strategy", ["max", "sum"])
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_every_pooling(strategy: str, activation: str, tmp_path: Path) -> None:
    pooling = {"pooling_strategy": strategy, "activation_function": activation}
    folder = save_sparse(tmp_path, pooling=pooling, tie_word_embeddings=False)
    np.testing.assert_allclose(ours(folder), theirs(folder), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_task_of_masked_language_models(is_causal: bool, tmp_path: Path) -> None:
    """Checkpoints whose own code is a masked language model on the trunk say fill-mask."""
    transformers.AutoModelForMaskedLM.register(
        transformers.Qwen3Config, transformers.Qwen3ForCausalLM, exist_ok=True
    )
    settings = {"transformer_task": "fill-mask"}
    folder = save_sparse(tmp_path, settings=settings, is_causal=is_causal)
    np.testing.assert_allclose(ours(folder), theirs(folder), atol=1e-4)


def test_the_layout_before_version_5_4(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path)
    wanted = ours(folder)
    text = (folder / "modules.json").read_text()
    text = text.replace(
        "base.modules.transformer.Transformer", "sparse_encoder.models.MLMTransformer"
    )
    (folder / "modules.json").write_text(text)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    np.testing.assert_array_equal(ours(folder), wanted)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_causal", [True, False])
def test_half_types(dtype: str, is_causal: bool, tmp_path: Path) -> None:
    folder = save_sparse(tmp_path, is_causal=is_causal)
    exact, found = ours(folder), ours(folder, dtype=dtype)
    model = SparseEncoder(str(folder), device="cpu", model_kwargs={"dtype": getattr(torch, dtype)})
    stock = model.encode(INPUTS).to_dense().float().numpy()
    errors = [np.square(vectors - exact).mean() for vectors in (found, stock)]
    assert errors[0] <= errors[1]


def test_wrap(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    folder = save_sparse(tmp_path, is_causal=False)
    wanted = theirs(folder)
    wrapped = bytetx.wrap(SparseEncoder(str(folder), device="cpu"))
    np.testing.assert_allclose(wrapped.encode(INPUTS).to_dense().numpy(), wanted, atol=1e-4)
    assert [str(w.message) for w in recwarn if issubclass(w.category, FallbackWarning)] == []


def test_texts_that_begin_alike_share_a_pass(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path)
    model = bytetx.load(folder, device="cpu")
    given = [" ".join(SENTENCES[:2]) + f" {text}" for text in texts(12, max_words=4)]
    together = model.embed_sparse(given, truncate=True).to_scipy().toarray()
    alone = [model.embed_sparse([text], truncate=True).to_scipy().toarray()[0] for text in given]
    np.testing.assert_allclose(together, np.stack(alone), atol=1e-5)


def test_what_is_refused(tmp_path: Path) -> None:
    folder = save_sparse(tmp_path)
    with pytest.raises(InputError, match="language model head"):
        bytetx.load(folder, device="cpu").generate(["a"])
    edit_json(folder / "sentence_bert_config.json", processing_kwargs={"text": {}})
    with pytest.raises(CheckpointError, match="logits_to_keep is 1, .* it must be 0"):
        bytetx.load(folder, device="cpu")
    settings = {"module_output_name": "causal_logits"}
    edit_json(folder / "sentence_bert_config.json", **ALL_LOGITS | settings)
    with pytest.raises(CheckpointError, match="module_output_name 'causal_logits' is not"):
        bytetx.load(folder, device="cpu")
    with pytest.raises(CheckpointError, match="sparse vectors of granite .* divided or capped"):
        bytetx.load(save_sparse(tmp_path / "granite", "granite"), device="cpu")
    plain = bytetx.load(save_causal(tmp_path / "plain"), device="cpu")
    with pytest.raises(InputError, match="gives no sparse vectors"):
        plain.embed_sparse(["a"])
