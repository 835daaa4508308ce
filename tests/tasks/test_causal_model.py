"""Causal checkpoints through bytetx.load: scores, embeddings, the command line, what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SENTENCES, edit_json, save_causal, save_checkpoint
from cli_runs import Bytetx
from tiny import one_thread, random_ids  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import expected, tiny_decoder
from torch.nn import functional as F

import bytetx as api
from bytetx.errors import CheckpointError, InputError, TooLongError

TEXTS = [text for text in SENTENCES if text]


def wanted_scores(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    logits = expected(model, ids).logits[0]
    return -F.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")


@pytest.mark.feature("Tasks", "`score`: log-likelihoods of causal models")
@pytest.mark.parametrize("name", ["qwen3", "gpt2", "gptj", "opt-post"])
def test_score(name: str, tmp_path: Path) -> None:
    model = api.load(save_causal(tmp_path, name), token_budget=64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    scores = model.score(TEXTS)
    for text, score in zip(TEXTS, scores, strict=True):
        ids = tokenizer(text)["input_ids"]
        wanted = wanted_scores(theirs, ids)
        assert score.num_tokens == len(ids) - 1
        np.testing.assert_allclose(score.token_log_likelihoods, wanted, atol=1e-4)
        assert score.log_likelihood == pytest.approx(float(wanted.sum()), abs=1e-3)
        assert score.perplexity == pytest.approx(float((-wanted.mean()).exp()), rel=1e-4)
    assert scores.stats.num_texts == len(TEXTS)


def test_score_of_ids(tmp_path: Path) -> None:
    model = api.load(save_causal(tmp_path))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = random_ids([96, 1, 2, 30])
    scores = model.score(ids)
    assert [score.num_tokens for score in scores] == [95, 0, 1, 29]
    assert scores[1].log_likelihood == 0.0 and math.isnan(scores[1].perplexity)
    np.testing.assert_allclose(
        scores[0].token_log_likelihoods, wanted_scores(theirs, ids[0]), atol=1e-4
    )
    alone = [model.score([own])[0].log_likelihood for own in ids]
    assert alone == [score.log_likelihood for score in scores]


def test_what_score_refuses(tmp_path: Path) -> None:
    model = api.load(save_causal(tmp_path / "causal"))
    with pytest.raises(TooLongError, match=r"texts\[1\] has 97 token ids, the model takes at mos"):
        model.score([[5], random_ids([97])[0]])
    kept = model.score([[5, 6], [], [5, 10**6]], on_error="return")
    assert kept[0].num_tokens == 1
    assert all(isinstance(error, InputError) for error in kept[1:])
    for name, head in (("encoder", "Model"), ("base", None)):
        folder = tmp_path / name
        if head is None:
            save_causal(folder, "llama", "Model")
        else:
            save_checkpoint(folder, "bert", head=head)
        with pytest.raises(InputError, match="has no language model head"):
            api.load(folder).score(["text"])
    with pytest.raises(InputError, match="has no sequence classification head"):
        model.classify(["text"])


def test_score_on_the_command_line(bytetx: Bytetx, tmp_path: Path) -> None:  # noqa: F811
    folder = save_causal(tmp_path / "model")
    (tmp_path / "texts.txt").write_text("\n".join([*TEXTS, "x" * 300, ""]))
    ran = bytetx("score", tmp_path / "texts.txt", "-m", folder, "-o", tmp_path / "out.jsonl")
    assert ran.code == 0, ran.err
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    scores = api.load(folder).score(TEXTS)
    for line, score in zip(lines[:-1], scores, strict=True):
        assert line["num_tokens"] == score.num_tokens
        assert line["log_likelihood"] == pytest.approx(score.log_likelihood, abs=1e-4)
        assert line["perplexity"] == pytest.approx(score.perplexity, rel=1e-5)
    assert "--truncate" in lines[-1]["error"]


def test_embeddings_of_the_last_token(tmp_path: Path) -> None:
    """A decoder as sentence-transformers saves it: the last token's row, normalised."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    base = save_causal(tmp_path / "base", "qwen3", "Model")
    width = transformers.AutoConfig.from_pretrained(base).hidden_size
    modules = [Transformer(str(base)), Pooling(width, pooling_mode="lasttoken"), Normalize()]
    theirs = SentenceTransformer(modules=modules, device="cpu", prompts={"query": "Find: "})
    theirs.save(str(tmp_path / "model"))
    model = api.load(tmp_path / "model")
    assert model.info()["pooling"] == ["lasttoken"]
    wanted = np.stack([theirs.encode(text) for text in TEXTS])
    np.testing.assert_allclose(model.embed(TEXTS).vectors, wanted, atol=1e-5)
    wanted = np.stack([theirs.encode(text, prompt_name="query") for text in TEXTS])
    np.testing.assert_allclose(model.embed(TEXTS, prompt_name="query"), wanted, atol=1e-5)


def test_hidden_states_and_info(tmp_path: Path) -> None:
    model = api.load(save_causal(tmp_path, "opt-post"), dtype="bfloat16")
    assert model.info()["heads"] == ["language model"]
    assert model.embed([[5, 6, 7]], pooling="lasttoken").shape == (1, 32)
    assert model.hidden_states([[5, 6, 7]], layers=[0, 1, 3])[0].shape == (3, 3, 48)


REFUSED = [
    (
        "llama",
        {"model_type": "mamba"},
        "has model_type 'mamba'; bytetx knows: albert, .*bert, .*camem",
    ),
    ("llama", {"quantization_config": {"bits": 4}}, "the weights are quantised"),
    ("llama", {"hidden_act": "relu"}, "means 'relu', this family's gate must be one of gelu"),
    ("llama", {"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of num_key_value"),
    ("llama", {"num_key_value_heads": 4}, r"k_proj.weight' has shape \(24, 48\), config.json impl"),
    ("llama", {"head_dim": 16}, r"q_proj.weight' has shape \(48, 48\), config.json implies \(64"),
    ("llama", {"head_dim": 7}, "7 rotated features of a head of 7 are asked for; they must be ev"),
    ("llama", {"attention_bias": True}, "lacks 12 tensors: .*q_proj.bias"),
    ("llama", {"num_hidden_layers": 4}, "lacks 9 tensors: layers.3"),
    ("llama", {"num_hidden_layers": 2}, "more layers than the 2 of config.json"),
    ("llama", {"num_hidden_layers": 10**9}, "lacks 1000 or more tensors"),
    ("llama", {"vocab_size": 61}, "embed_tokens.weight' has shape"),
    (
        "llama",
        {"max_position_embeddings": 10**12},
        "must be an integer from 1 to 2147483647, got 1000000000000",
    ),
    ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type 'longrope' is not suppo"),
    (
        "llama",
        {"rope_parameters": {"rope_type": "linear"}},
        "rope factor must be a positive number",
    ),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0.5}}, "must be at least 1"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "differ by layer type"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters must be a table"),
    ("llama", {"partial_rotary_factor": 0.5}, "this family rotates whole heads"),
    ("qwen2", {"layer_types": ["full_attention"]}, "must name 3 layers' attention, each one of"),
    ("qwen2", {"layer_types": ["a", "b", "c"]}, "must name 3 layers' attention, each one of"),
    (
        "qwen3",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types has sliding_attention, and sliding_window, .* no layer has a window",
    ),
    ("qwen2", {"use_sliding_window": "no"}, "use_sliding_window must be true or false"),
    (
        "mistral",
        {"sliding_window": 0},
        "sliding_window must be an integer from 1 to 2147483647, got 0",
    ),
    ("gpt_neo", {"attention_types": [[["global"], 10**9]]}, "must name 3 layers' attention"),
    ("gpt2", {"add_cross_attention": True}, "runs as a decoder without an encoder only"),
    ("gpt2", {"n_positions": 95}, r"wpe.weight' has shape \(96, 48\), config.json implies \(95,"),
    ("gpt2", {"architectures": ["GPT2ForSequenceClassification"]}, "lacks that head's tensors"),
    ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "a head that bytetx does not"),
    ("gptj", {"rotary_dim": 14}, "14 rotated features of a head of 12"),
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm True is not supported"),
    ("opt", {"do_layer_norm_before": 1}, "do_layer_norm_before must be true or false, got 1"),
]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    REFUSED,
    ids=[f"{r[0]}-{[*r[1]][0]}-{i}" for i, r in enumerate(REFUSED)],
)
def test_configs_that_lie(name: str, changes: dict, message: str, tmp_path: Path) -> None:
    tiny_decoder(name).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(CheckpointError, match=message):
        api.load(tmp_path)


def test_a_missing_head(tmp_path: Path) -> None:
    tiny_decoder("llama", "Model").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(CheckpointError, match="the checkpoint lacks that head's tensors"):
        api.load(tmp_path)


def test_a_saved_head_goes_before_a_tied_one(tmp_path: Path) -> None:
    model = tiny_decoder("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", tie_word_embeddings=True)
    ids = random_ids([9])
    score = api.load(tmp_path).score(ids)[0]
    np.testing.assert_allclose(score.token_log_likelihoods, wanted_scores(model, ids[0]), atol=1e-4)
