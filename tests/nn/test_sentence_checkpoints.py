"""Whole checkpoints of sentence-transformers, as models of each name are saved, against encode."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from checkpoints import SENTENCES, edit_json, make_tokenizer, save_causal, save_gemma, texts
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tiny import one_thread, randomize  # noqa: F401  (autouse)
from torch import nn

import bytetx
from bytetx.errors import TooLongError
from bytetx.hf import FallbackWarning

HIDDEN = 48
INPUTS = SENTENCES + texts(12, max_words=9)
TASK = "Instruct: Given a web search query, retrieve relevant passages\nQuery:"


def save(folder: Path, base: Path, modules: Sequence[nn.Module], **options: object) -> Path:
    for module in modules:
        randomize(module)
    model = SentenceTransformer(modules=[Transformer(str(base)), *modules], device="cpu", **options)
    model.save_pretrained(str(folder))
    return folder


def save_t5(folder: Path, **config: object) -> Path:
    """A random encoder of T5, whose tokenizer ends each text by </s>."""
    tokenizer = make_tokenizer("unigram", max_tokens=64)
    end = tokenizer.convert_tokens_to_ids("</s>")
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=["$A", "</s>"], special_tokens=[("</s>", end)]
    )
    sizes = {"d_model": HIDDEN, "num_heads": 3, "d_kv": 8, "d_ff": 80, "num_layers": 2}
    settings = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id} | sizes
    model = transformers.T5EncoderModel(transformers.T5Config(**settings | config))
    randomize(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def assert_same(folder: Path, **options: object) -> None:
    wanted = SentenceTransformer(str(folder), device="cpu").encode(INPUTS, **options)
    found = bytetx.load(folder, device="cpu").embed(INPUTS, truncate=True, **options).vectors
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("activation", ["relu", "gated-gelu"])
def test_sentence_t5_and_gtr(activation: str, tmp_path: Path) -> None:
    base = save_t5(tmp_path / "base", feed_forward_proj=activation)
    dense = Dense(HIDDEN, 20, bias=False, activation_function=nn.Identity())
    folder = save(tmp_path / "model", base, [Pooling(HIDDEN, "mean"), dense, Normalize()])
    assert_same(folder)
    # The hub's files are of the complete model's config, and of sentence-transformers 2.
    edit_json(folder / "config.json", architectures=["T5EncoderModel"], is_encoder_decoder=True)
    old = {"max_seq_length": 16, "do_lower_case": False}
    (folder / "sentence_bert_config.json").write_text(json.dumps(old))
    flags = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(flags))
    entries = json.loads((folder / "modules.json").read_text())
    for entry in entries:
        kind = entry["type"].rpartition(".")[2]
        entry["type"] = f"sentence_transformers.models.{kind}"
    (folder / "modules.json").write_text(json.dumps(entries))
    assert bytetx.load(folder, device="cpu").max_tokens == 16
    assert_same(folder)


@pytest.mark.feature("Checkpoints", "instructions and prompts of sentence checkpoints")
def test_instructor(tmp_path: Path) -> None:
    """Its instructions are prompts that are left out of the mean."""
    base = save_t5(tmp_path / "base")
    dense = Dense(HIDDEN, HIDDEN, bias=False, activation_function=nn.Identity())
    modules = [Pooling(HIDDEN, "mean", include_prompt=False), dense, Normalize()]
    folder = save(tmp_path / "model", base, modules)
    assert_same(folder, prompt="The quick fox jumps: ")
    assert_same(folder, prompt="Berlin")
    assert_same(folder)


@pytest.mark.feature("Checkpoints", "embedding models of causal families")
def test_qwen3_embedding(tmp_path: Path) -> None:
    """The last token of sequences that a batch pads on the left."""
    base = save_causal(tmp_path / "base", "qwen3", "Model")
    edit_json(base / "tokenizer_config.json", padding_side="left")
    prompts = {"query": TASK, "document": ""}
    modules = [Pooling(HIDDEN, "lasttoken"), Normalize()]
    folder = save(tmp_path / "model", base, modules, prompts=prompts)
    assert json.loads((folder / "tokenizer_config.json").read_text())["padding_side"] == "left"
    assert_same(folder)
    assert_same(folder, prompt_name="query")


def test_e5_mistral(tmp_path: Path) -> None:
    """A causal model with a window, last token, and a limit below its positions."""
    base = save_causal(tmp_path / "base", "mistral", "Model")
    edit_json(base / "tokenizer_config.json", padding_side="left")
    folder = save(
        tmp_path / "model",
        base,
        [Pooling(HIDDEN, "lasttoken"), Normalize()],
        prompts={"web_search_query": TASK},
    )
    edit_json(folder / "sentence_bert_config.json", max_seq_length=40)
    assert_same(folder, prompt_name="web_search_query")
    assert_same(folder)
    model = bytetx.load(folder, device="cpu")
    assert model.max_tokens == 40
    with pytest.raises(TooLongError):
        model.embed(["fox " * 60])


def test_embedding_gemma(tmp_path: Path) -> None:
    """A window without the causal mask, two layers behind the mean, and prompts by their names."""
    base = save_gemma(
        tmp_path / "base", "gemma3", "Model", adds_end=True, use_bidirectional_attention=True
    )
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    wide = Dense(HIDDEN, 4 * HIDDEN, bias=False, activation_function=nn.Identity())
    back = Dense(4 * HIDDEN, HIDDEN, bias=False, activation_function=nn.Identity())
    modules = [Pooling(HIDDEN, "mean"), wide, back, Normalize()]
    folder = save(tmp_path / "model", base, modules, prompts=prompts, similarity_fn_name="cosine")
    assert_same(folder)
    theirs, model = SentenceTransformer(str(folder), device="cpu"), bytetx.load(folder)
    assert model.spec.is_bidirectional
    inputs = [text for text in INPUTS if text]
    for name, encode in (("query", theirs.encode_query), ("document", theirs.encode_document)):
        found = model.embed(inputs, prompt_name=name, truncate=True).vectors
        np.testing.assert_allclose(found, encode(inputs), atol=1e-4, rtol=1e-4)
    found = model.embed(inputs, dimensions=16, truncate=True).vectors
    wanted = theirs.encode(inputs, truncate_dim=16, normalize_embeddings=True)
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)
    wanted = theirs.encode_query(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FallbackWarning)
        found = bytetx.wrap(theirs).encode_query(inputs)
    np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=1e-4)


def save_pplx(folder: Path) -> Path:
    """pplx-embed: a bidirectional Qwen3, its mean, and whole numbers by tanh."""
    base = save_causal(folder / "base", "qwen3", "Model", is_causal=False)
    save(folder / "model", base, [Pooling(HIDDEN, "mean")])
    folder /= "model"
    entries = json.loads((folder / "modules.json").read_text())
    entries.append({"idx": 2, "name": "2", "path": "", "type": "st_quantize.FlexibleQuantizer"})
    (folder / "modules.json").write_text(json.dumps(entries))
    auto_map = {
        "AutoConfig": "configuration.PPLXQwen3Config",
        "AutoModel": "modeling.PPLXQwen3Model",
    }
    edit_json(
        folder / "config.json",
        model_type="bidirectional_pplx_qwen3",
        architectures=["PPLXQwen3Model"],
        auto_map=auto_map,
        is_causal=True,
        use_bidirectional_attention=True,
    )
    return folder


def test_pplx_embed_has_prompts(tmp_path: Path) -> None:
    folder = save_pplx(tmp_path)
    prompts = {"query": "Find what answers: ", "document": ""}
    edit_json(folder / "config_sentence_transformers.json", prompts=prompts)
    plain = SentenceTransformer(
        modules=[Transformer(str(tmp_path / "base")), Pooling(HIDDEN, "mean")],
        device="cpu",
        prompts=prompts,
    )
    model = bytetx.load(folder, device="cpu")
    for name, prompt in prompts.items():
        wanted = np.rint(np.tanh(plain.encode(INPUTS, prompt_name=name)) * 127)
        found = [model.embed(INPUTS, prompt_name=name), model.embed(INPUTS, prompt=prompt)]
        found.append(model.embed(INPUTS, task=name))
        for one in found:
            assert np.abs(one.vectors - wanted).max() <= 1 and (one.vectors == wanted).mean() > 0.99
    assert not np.array_equal(found[0].vectors, model.embed(INPUTS, prompt_name="query").vectors)


@pytest.mark.feature("Checkpoints", "vectors that are whole numbers (pplx-embed)")
def test_pplx_embed_gives_whole_numbers(tmp_path: Path) -> None:
    folder = save_pplx(tmp_path)
    plain = SentenceTransformer(
        modules=[Transformer(str(tmp_path / "base")), Pooling(HIDDEN, "mean")], device="cpu"
    )
    pooled = plain.encode(INPUTS)
    wanted = np.rint(np.tanh(pooled) * 127)
    model = bytetx.load(folder, device="cpu")
    vectors = model.embed(INPUTS).vectors
    assert vectors.dtype == np.float32 and np.array_equal(vectors, np.rint(vectors))
    # A number that lies between two whole ones may be rounded to either.
    assert np.abs(vectors - wanted).max() <= 1 and (vectors == wanted).mean() > 0.99
    small = model.embed(INPUTS, precision="int8").vectors
    assert small.dtype == np.int8 and np.array_equal(small, vectors)
    assert np.array_equal(model.embed(INPUTS[:1], precision="int8").vectors, small[:1])
    assert np.array_equal(model.embed(INPUTS, precision="uint8").vectors, vectors + 128)
    assert np.array_equal(
        model.embed(INPUTS, precision="int8", dimensions=16).vectors, small[:, :16]
    )
    bits = model.embed(INPUTS, precision="ubinary").vectors
    assert (bits == np.packbits(pooled >= 0, axis=1)).mean() > 0.99
    lengths = np.linalg.norm(model.embed(INPUTS, normalize=True).vectors, axis=1)
    assert np.allclose(lengths, 1, atol=1e-5)
    long = model.embed([" ".join(INPUTS * 9)], overflow="chunk", precision="int8").vectors
    assert long.dtype == np.int8 and long.any()
