"""Decoders whose tokens see their whole sequence, against transformers' classes without a mask."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from checkpoints import edit_json, save_causal
from tiny import half_errors, load, one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import WINDOW, expected, tiny_decoder

import bytetx
from bytetx.checkpoint.layer_spec import QueryGrowth
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import CheckpointError, InputError
from bytetx.nn import heads

SEQLENS = [1, 2, WINDOW, WINDOW + 1, WINDOW + 2, 40, 3]
FAMILIES = ["llama", "mistral-full", "mistral", "qwen2", "qwen2-window", "qwen3"]
FAMILIES += ["ministral3", "ministral3-window"]
# config.json's ways to say it, by family.
WAYS = [
    ("llama", {"is_causal": False}),
    ("llama", {"use_bidirectional_attention": True}),
    ("llama", {"architectures": ["LlamaBidirectionalModel"]}),
    ("llama", {"model_type": "llama_bidirec", "architectures": None}),
    (
        "llama",
        {"auto_map": {"AutoModel": "McGill-NLP/repo--modeling_llama_encoder.LlamaEncoderModel"}},
    ),
    (
        "llama",
        {"auto_map": {"AutoModel": "llama_bidirectional_model.LlamaBidirectionalModel"}},
    ),
    (
        "mistral-full",
        {"auto_map": {"AutoModel": "modeling_mistral_encoder.MistralEncoderModel"}},
    ),
    (
        "qwen3",
        {
            "model_type": "bidirectional_pplx_qwen3",
            "use_bidirectional_attention": True,
            "auto_map": {
                "AutoConfig": "configuration.PPLXQwen3Config",
                "AutoModel": "modeling.PPLXQwen3Model",
            },
        },
    ),
    (
        "ministral3",
        {
            "model_type": "ministral3_bidirec",
            "architectures": ["Ministral3BidirectionalModel"],
            "auto_map": {"AutoModel": "model.Ministral3BidirectionalModel"},
        },
    ),
    (
        "qwen2",
        {"is_causal": False, "auto_map": {"AutoModel": "modeling_qwen.Qwen2Model"}},
    ),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_hidden_states(name: str, tmp_path: Path) -> None:
    model = tiny_decoder(name, "Model", is_causal=False)
    loaded, ids, layers = load(save(model, tmp_path)), random_ids(SEQLENS), []
    assert loaded.spec.is_bidirectional and not loaded.spec.is_causal
    batch = loaded.pack(ids)
    loaded.transformer.forward(batch, on_layer=layers.append)
    starts = batch.cu_seqlens.tolist()
    causal = load(save(tiny_decoder(name, "Model"), tmp_path / "causal")).rows(ids)
    for i, sequence in enumerate(ids):
        wanted = expected(model, sequence).hidden_states
        for layer, rows in enumerate(layers):
            own = rows[starts[i] : starts[i + 1]]
            assert (own - wanted[layer][0]).abs().max() < 1e-4
        assert torch.equal(own, loaded.rows([sequence])[0])
        assert len(sequence) == 1 or not torch.allclose(own[0], causal[i][0], atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen3", "ministral3", "ministral3-window"])
def test_half_types_err_no_more_than_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Ministral 3's queries grow with their position, from 6 tokens on here."""
    model = tiny_decoder(name, "Model", is_causal=False).to(dtype)
    ours, theirs = half_errors(load(save(model, tmp_path), dtype), model)
    assert ours < 1.1 * theirs


@pytest.mark.parametrize(("name", "config"), WAYS)
def test_ways_to_say_it(name: str, config: dict[str, object], tmp_path: Path) -> None:
    model = tiny_decoder(name, is_causal=False)
    save(model, tmp_path)
    edit_json(tmp_path / "config.json", **{"is_causal": True} | config)
    loaded, ids = load(tmp_path), random_ids([17, 1])
    assert loaded.spec.is_bidirectional
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert (rows - expected(model, sequence).hidden_states[-1][0]).abs().max() < 1e-4


def test_code_whose_mask_a_config_does_not_name_is_refused(tmp_path: Path) -> None:
    save(tiny_decoder("qwen2"), tmp_path)
    edit_json(tmp_path / "config.json", auto_map={"AutoModel": "modeling_qwen.Qwen2Model"})
    with pytest.raises(CheckpointError, match="the checkpoint's own code for AutoModel"):
        load(tmp_path)


def test_a_causal_checkpoint_stays_causal() -> None:
    for config in ({}, {"is_causal": True}):
        spec = build_spec({"model_type": "qwen2"} | config)
        assert spec.is_causal and not spec.is_bidirectional and "lm" in spec.heads
    with pytest.raises(CheckpointError, match="is_causal must be true or false, got 0"):
        build_spec({"model_type": "qwen2", "is_causal": 0})


def test_growing_queries_as_files_have_them() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "mscale": 1.0}
    rope |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 16384}
    text = {"model_type": "ministral3", "rope_parameters": rope | {"llama_4_scaling_beta": 0.1}}
    for config in (text, {"model_type": "mistral3", "text_config": text}):
        layers = build_spec(config).layer_spec
        assert layers.query_growth == QueryGrowth(0.1, 16384)
        assert layers.rotary.attention_factor == 1.0
    layers = build_spec({"model_type": "ministral3"}).layer_spec  # what the class then takes
    assert layers.query_growth == QueryGrowth(0.1, 16384) and layers.rotary.factor == 16.0
    small = {"model_type": "mistral3", "text_config": {"model_type": "mistral", "rope_theta": 1e9}}
    assert build_spec(small).layer_spec.query_growth is None
    for changes, message in (
        ({"rope_parameters": [1]}, "rope_parameters must be a table"),
        (
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "must be a positive integer, got None",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            build_spec(text | changes)


def test_it_embeds_and_refuses_to_generate(tmp_path: Path) -> None:
    save_causal(tmp_path, "qwen2")
    causal = bytetx.load(tmp_path, device="cpu")
    edit_json(tmp_path / "config.json", is_causal=False)
    model = bytetx.load(tmp_path, device="cpu")
    texts = ["one", "a text of several words", ""]
    vectors = model.embed(texts)
    states = model.hidden_states(texts)
    for text, vector in zip(texts, vectors, strict=True):
        assert np.allclose(vector, model.embed([text])[0], atol=1e-5)
    assert not np.allclose(vectors[1], causal.embed(texts)[1], atol=1e-3)
    assert len(states) == 3
    with pytest.raises(InputError, match="sees its whole sequence .* so it cannot generate"):
        model.generate(["one"])
    with pytest.raises(InputError, match="sees its whole sequence .* predicts no next token"):
        model.score(["one"])


@pytest.mark.parametrize("pooling", [None, "last", "avg"])
def test_sequence_classification(pooling: str | None, tmp_path: Path) -> None:
    options = {"num_labels": 3, "pad_token_id": 0, "is_causal": False}
    model = tiny_decoder("llama", "ForSequenceClassification", **options)
    save(model, tmp_path)
    edit_json(tmp_path / "config.json", pooling=pooling, temperature=1.0)
    loaded, ids = load(tmp_path), random_ids([1, 2, 17])
    head = heads.load_sequence_classification(loaded.spec, loaded.loader)
    batch = loaded.pack(ids)
    logits = head.classify(loaded.transformer.forward(batch), batch)
    for sequence, found in zip(ids, logits, strict=True):
        rows = expected(model.model, sequence).last_hidden_state[0]
        row = rows.mean(0) if pooling == "avg" else rows[-1]
        with torch.no_grad():
            assert (found - model.score(row)).abs().max() < 1e-4
    for changes, message in (
        ({"temperature": 0.5}, "temperature is 0.5"),
        ({"pooling": "weighted_avg"}, "pooling must be one of last, avg, mean, cls"),
    ):
        edit_json(tmp_path / "config.json", **{"pooling": None, "temperature": None} | changes)
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)


@pytest.mark.parametrize("is_listed", [False, True])
def test_gte_qwen2_ends_its_texts_as_its_own_code_does(is_listed: bool, tmp_path: Path) -> None:
    """tokenizer.json does not name the token that the last row is pooled from."""
    save_causal(tmp_path, "qwen2")
    file = tmp_path / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    backend.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    backend.save(str(file))
    plain = bytetx.load(tmp_path, device="cpu").tokenizer.backend.encode("one text").ids
    name = "somebody/gte--tokenization_qwen.Qwen2TokenizerFast"
    auto_map = {"AutoTokenizer": [None, name] if is_listed else name}
    config = tmp_path / "tokenizer_config.json"
    edit_json(config, auto_map=auto_map, add_eos_token=True, eos_token="</s>")
    tokenizer = bytetx.load(tmp_path, device="cpu").tokenizer
    end = tokenizer.backend.token_to_id("</s>")
    assert tokenizer.backend.encode("one text").ids == [*plain, end]
    assert tokenizer.backend.encode("one", "text").ids.count(end) == 2
    edit_json(config, add_eos_token=False)
    assert bytetx.load(tmp_path, device="cpu").tokenizer.backend.encode("one text").ids == plain
