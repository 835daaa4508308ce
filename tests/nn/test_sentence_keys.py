"""Every key of sentence-transformers' files: vectors equal its own, or the key is refused by name.

Keys that are read nowhere were ignored in silence, and the vectors were others.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import (
    HIDDEN_SIZE,
    SENTENCES,
    edit_json,
    make_tokenizer,
    save_checkpoint,
    save_sentence_model,
)
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.base.modules import Dense, Normalize
from sentence_transformers.sentence_transformer.modules import LayerNorm, Pooling
from tiny import one_thread, tiny_model  # noqa: F401  (one_thread: autouse)
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.checkpoint.sentence_files import TRANSFORMER_FILES
from bytetx.errors import CheckpointError

MODEL, BERT = "config_sentence_transformers.json", "sentence_bert_config.json"
TEXTS = SENTENCES[:4]
FORWARD = {"method": "forward", "method_output_name": "last_hidden_state"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    modules = [
        Pooling(HIDDEN_SIZE, "mean"),
        Dense(HIDDEN_SIZE, 16),
        LayerNorm(16),
        Normalize(),
    ]
    options = {"prompts": {"query": "find the dog: "}}
    return save_sentence_model(tmp_path_factory.mktemp("keys"), modules, **options)


@dataclass(frozen=True)
class Case:
    """keys: written into a file.  refused: the key that an error must name; None: results are
    equal."""

    file: str
    keys: Mapping[str, Any]
    refused: str | None = None

    def __str__(self) -> str:
        return f"{self.file.removesuffix('.json')} {json.dumps(self.keys)}"[:100]


def text(**options: Any) -> dict[str, Any]:
    return {"processing_kwargs": {"text": options}}


def output(name: object, *, to: str = "token_embeddings") -> dict[str, Any]:
    entry = {"method": "forward", "method_output_name": name}
    return {"modality_config": {"text": entry}, "module_output_name": to}


CASES = [
    Case(MODEL, {"truncate_dim": 8}),
    Case(MODEL, {"truncate_dim": 999}),
    Case(MODEL, {"default_prompt_name": "query"}),
    Case(MODEL, {"similarity_fn_name": "dot"}),
    Case(MODEL, {"max_active_dims": 3}),
    Case(MODEL, {"requirements": {}}),
    Case(MODEL, {"keep_in_fp32_modules": ["x"]}),
    Case(BERT, {"max_seq_length": 5}),
    Case(BERT, {"max_seq_length": 5, "processor_kwargs": {"model_max_length": 7}}),
    Case(BERT, {"do_lower_case": True}),
    Case(BERT, {"unpad_inputs": False}),
    Case(BERT, {"processor_kwargs": {"model_max_length": 4}}),
    Case(BERT, {"tokenizer_args": {"model_max_length": 4, "padding_side": "left"}}),
    Case(BERT, {"processor_kwargs": {"do_lower_case": False}}, "do_lower_case"),
    Case(BERT, {"tokenizer_args": {"cls_token": "[MASK]"}}, "cls_token"),
    Case(BERT, {"processor_kwargs": {"truncation_side": "left"}}, "truncation_side"),
    Case(BERT, {"config_kwargs": {"hidden_act": "relu"}}, "hidden_act"),
    Case(BERT, {"config_args": {"num_hidden_layers": 1}}, "num_hidden_layers"),
    Case(BERT, {"model_kwargs": {"attn_implementation": "eager"}}),
    Case(BERT, {"model_args": {"torch_dtype": "float32", "add_pooling_layer": False}}),
    Case(BERT, {"model_args": {"num_hidden_layers": 1}}, "num_hidden_layers"),
    Case(BERT, text(max_length=4)),
    Case(BERT, {"processing_kwargs": {"common": {"max_length": 4}}}),
    Case(BERT, text(max_length=6) | {"max_seq_length": 4}),
    Case(BERT, text(padding="max_length", max_length=9)),
    Case(BERT, text(truncation="longest_first")),
    Case(BERT, text(truncation=False), "truncation"),
    Case(BERT, text(add_special_tokens=False), "add_special_tokens"),
    Case(BERT, {"processing_kwargs": {"image": {"size": 3}}}),
    Case(BERT, {"processing_kwargs": {"chat_template": {"enable_thinking": True}}}),
    Case(BERT, output("last_hidden_state")),
    Case(BERT, output(["last_hidden_state"])),
    Case(BERT, output(["hidden_states", -2]), "method_output_name"),
    Case(BERT, output("pooler_output"), "method_output_name"),
    Case(BERT, output("pooler_output", to="sentence_embedding"), "module_output_name"),
    Case(BERT, {"modality_config": {"text": FORWARD}, "module_output_name": None}, "module_output"),
    Case(BERT, {"modality_config": {"image": FORWARD}}, "text"),
    Case(BERT, {"modality_config": {"text": FORWARD | {"method": "get_text_features"}}}, "method"),
    Case(BERT, {"modality_config": {"text": FORWARD, "message": FORWARD}}, "message"),
    Case(BERT, {"transformer_task": "fill-mask"}, "transformer_task"),
    Case(BERT, {"transformer_task": "any-to-any"}, "transformer_task"),
    Case(BERT, {"tokenizer_name_or_path": "other"}, "tokenizer_name_or_path"),
    Case(BERT, {"query_length": 3}, "query_length"),
    Case(BERT, {"query_expansion": {"length": 8}}, "query_expansion"),
    Case("1_Pooling/config.json", {"pooling_mode": "cls"}),
    Case("1_Pooling/config.json", {"pooling_mode": "mean_sqrt_len_tokens"}),
    Case("1_Pooling/config.json", {"word_embedding_dimension": None}),
    Case("2_Dense/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
    Case("2_Dense/config.json", {"module_output_name": "other"}, "module_output_name"),
    Case("2_Dense/config.json", {"activation_function": "torch.nn.modules.activation.GELU"}),
    Case("2_Dense/config.json", {"activation_function": "torch.nn.X"}, "activation"),
    Case("4_Normalize/config.json", {"module_input_name": "token_embeddings"}, "module_input_name"),
    Case("4_Normalize/config.json", {"module_output_name": "other"}, "module_output_name"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keys(case: Case, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    edit_json(folder / case.file, **case.keys)
    if case.refused is not None:
        with pytest.raises(CheckpointError, match=rf"{Path(case.file).name}.*{case.refused}"):
            bytetx.load(folder)
        return
    wanted = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    vectors = bytetx.load(folder).embed(TEXTS, truncate=True).vectors
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)


@pytest.mark.parametrize("name", TRANSFORMER_FILES)
def test_every_name_of_the_transformers_config(name: str, saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    (folder / BERT).unlink()
    (folder / name).write_text(json.dumps({"max_seq_length": 5, "do_lower_case": False}))
    wanted = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    vectors = bytetx.load(folder).embed(TEXTS, truncate=True).vectors
    np.testing.assert_allclose(vectors, wanted, atol=1e-5)


@pytest.mark.parametrize("file", [MODEL, BERT, "1_Pooling/config.json", "3_LayerNorm/config.json"])
def test_a_key_of_a_newer_version_is_named_once(
    file: str, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    edit_json(folder / file, key_of_tomorrow=1)
    with caplog.at_level(logging.WARNING, logger="bytetx"):
        bytetx.load(folder)
    named = [record for record in caplog.records if "key_of_tomorrow" in record.getMessage()]
    assert len(named) == 1 and Path(file).name in named[0].getMessage()


def test_dimensions_over_the_saved_ones(saved: Path, tmp_path: Path) -> None:
    """truncate_dim is what a call that says nothing gets; a call may ask for more or fewer."""
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    edit_json(folder / MODEL, truncate_dim=8)
    oracle, model = SentenceTransformer(str(folder), device="cpu"), bytetx.load(folder)
    for options in ({}, {"normalize_embeddings": True}):
        own = {"normalize": True} if options else {}
        np.testing.assert_allclose(
            model.embed(TEXTS, **own).vectors, oracle.encode(TEXTS, **options), atol=1e-5
        )
    for dimensions in (4, 12):
        wanted = oracle.encode(TEXTS, truncate_dim=dimensions, normalize_embeddings=True)
        vectors = model.embed(TEXTS, dimensions=dimensions).vectors
        np.testing.assert_allclose(vectors, wanted, atol=1e-5)
    assert model.embed(TEXTS, precision="int8").vectors.shape == (len(TEXTS), 8)
    chunks = model.embed([" ".join(TEXTS) * 3], overflow="chunk").vectors
    assert chunks.shape == (1, 8)


def test_modules_run_in_the_order_of_the_file(saved: Path, tmp_path: Path) -> None:
    """idx, which only numbers them, was the order."""
    folder = tmp_path / "model"
    shutil.copytree(saved, folder)
    modules = json.loads((folder / "modules.json").read_text())
    for place, module in enumerate(modules):
        module["idx"] = len(modules) - place
    (folder / "modules.json").write_text(json.dumps(modules))
    wanted = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(bytetx.load(folder).embed(TEXTS).vectors, wanted, atol=1e-5)


PLAIN = [
    ("llama", "ForCausalLM", {}),
    ("gpt2", "LMHeadModel", {}),
    ("qwen3", "ForCausalLM", {}),
    ("qwen3", "Model", {}),
    ("llama", "ForSequenceClassification", {}),
    ("llama", "ForCausalLM", {"is_causal": False}),
]


@pytest.mark.parametrize(("name", "head", "keys"), PLAIN)
def test_pooling_of_a_decoder_without_modules_json(
    name: str,
    head: str,
    keys: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A *ForCausalLM got the mean of its tokens."""
    tokenizer = make_tokenizer("bpe")
    tokenizer.save_pretrained(tmp_path)
    tiny_decoder(name, head, vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", pad_token_id=tokenizer.pad_token_id, **keys)
    oracle = SentenceTransformer(str(tmp_path), device="cpu")
    wanted = oracle.encode(TEXTS, batch_size=1)
    with caplog.at_level(logging.INFO, logger="bytetx"):
        vectors = bytetx.load(tmp_path).embed(TEXTS).vectors
    np.testing.assert_allclose(vectors, wanted, atol=2e-4)
    assert f"{oracle[1].pooling_mode} is used" in caplog.text


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_pooling_of_an_encoder_without_modules_json(head: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, head=head)
    wanted = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    np.testing.assert_allclose(bytetx.load(folder).embed(TEXTS).vectors, wanted, atol=1e-5)


def test_chats_of_a_decoder_without_modules_json_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """sentence-transformers puts each text into the chat template; embed says that it does not."""
    tokenizer = make_tokenizer("bpe")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    tiny_decoder("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    model = bytetx.load(tmp_path)
    with caplog.at_level(logging.WARNING, logger="bytetx"):
        model.embed(TEXTS)
        model.embed(TEXTS)
    assert caplog.text.count("chat template") == 1


def test_a_sparse_encoder_without_modules_json(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, head="ForMaskedLM")
    wanted = SparseEncoder(str(folder), device="cpu").encode(TEXTS, convert_to_sparse_tensor=False)
    rows = bytetx.load(folder).embed_sparse(TEXTS).to_scipy().toarray()
    np.testing.assert_allclose(rows, np.asarray(wanted), atol=1e-4)


def test_a_cross_encoder_with_a_default_prompt(tmp_path: Path) -> None:
    """The prompt was left out."""
    save_checkpoint(tmp_path / "base", head="ForSequenceClassification", num_labels=1)
    encoder = CrossEncoder(
        str(tmp_path / "base"),
        device="cpu",
        prompts={"dog": "a dog says "},
        default_prompt_name="dog",
    )
    encoder.save_pretrained(str(tmp_path / "saved"))
    oracle = CrossEncoder(str(tmp_path / "saved"), device="cpu")
    wanted = oracle.predict([(TEXTS[0], text) for text in TEXTS[1:]])
    hits = bytetx.load(tmp_path / "saved").rerank(TEXTS[0], TEXTS[1:], truncate=True)
    scores = [score for _, score in sorted((hit.index, hit.score) for hit in hits)]
    np.testing.assert_allclose(scores, wanted, atol=1e-5)
    assert torch.is_grad_enabled()
