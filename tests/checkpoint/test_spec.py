"""Family tables and config.json: every key is known, every size is checked."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from bytetx.checkpoint import family
from bytetx.checkpoint.config import ACTIVATIONS
from bytetx.checkpoint.families import read_families
from bytetx.checkpoint.family import read_family
from bytetx.checkpoint.rope_spec import SCALINGS
from bytetx.checkpoint.spec import ModelSpec, build_spec
from bytetx.errors import CheckpointError

MODELS = ROOT / "models"
BERT = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4}
NUMBER = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
ROPE = st.fixed_dictionaries(
    {"rope_type": st.sampled_from([*SCALINGS, "longrope", None])},
    optional={
        "factor": NUMBER | st.floats(1, 8),
        "rope_theta": NUMBER,
        "original_max_position_embeddings": NUMBER,
        "low_freq_factor": NUMBER | st.just(1.0),
        "high_freq_factor": NUMBER | st.just(4.0),
        "attention_factor": NUMBER,
        "beta_fast": NUMBER,
        "mscale": NUMBER,
        "mscale_all_dim": NUMBER,
        "partial_rotary_factor": NUMBER,
    },
)
# The hub's own code, of which transformers has no class; and Mistral 3, which transformers fills
# with another family's text model where config.json says nothing of it.
OF_THE_HUB = ("new", "llama_bidirec", "ministral3_bidirec", "bidirectional_pplx_qwen3", "mistral3")
OF_THE_HUB += ("jina_embeddings_v5",)
# transformers has no class with a head of them.
WITHOUT_HEADS = ("embedding_gemma2", "embedding_gemma2_text", "neomme")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("model_type", read_families().model_types)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    """A config.json that leaves everything out means what transformers' class means by it."""
    spec = build_spec({"model_type": model_type})
    assert model_type in spec.family_table["model_types"]
    if model_type in OF_THE_HUB:
        return
    stock = build_spec(transformers.AutoConfig.for_model(model_type).to_dict())
    # One file serves several classes, whose vocabularies and rotary bases every config.json names.
    named = {key: getattr(stock, key) for key in ("architectures", "vocab_size", "layer_spec")}
    assert replace(spec, **named) == stock
    assert spec.num_kv_heads <= spec.num_heads
    assert ("lm" in spec.heads) == spec.is_causal
    assert spec.is_causal or "token_classification" in spec.heads or model_type in WITHOUT_HEADS


def test_every_file_is_a_family() -> None:
    (own,) = read_families().groups
    assert {one.name for one in own if one.table} == {path.stem for path in MODELS.glob("*.toml")}
    known = read_families().model_types
    assert known == sorted(set(known))


def test_the_page_of_families_documents_every_key_and_value() -> None:
    page = MODELS.parent / "docs" / "models.md"
    documented = set(re.findall(r"`([^`]+)`", page.read_text(encoding="utf-8")))
    keys = {"model_types", "prefix", "defaults", "fixed"}
    for section, (required, optional) in family._SECTIONS.items():
        keys |= {section, *required, *optional}
    for required, optional in family._HEADS.values():
        keys |= required | optional
    allowed = [value for values in family._CLOSED_VALUES.values() for value in values]
    values = {str(value).lower() if value in (True, False) else value for value in allowed}
    activations = {*family.ACTIVATIONS, *ACTIVATIONS}
    assert keys | values | activations | set(SCALINGS) <= documented


# (what is replaced in bert.toml, by what, what the error says)
BROKEN_FAMILIES = [
    ("norm_placement", "norm_placment", r"\[architecture\] unknown key norm_placment; known"),
    ('"post"', '"sandwich"', "norm_placement is 'sandwich', must be one of post"),
    ("position_offset = 0", "position_offset = -1", "position_offset is -1"),
    ("position_offset = 0", 'position_offset = "later"', "'after_pad_token'"),
    ("[heads.pooler]", "[heads.poolr]", "unknown key poolr"),
    ('activation = "tanh"', 'activation = "mish"', "activation is 'mish'"),
    ("[layer]", "[layers]", "unknown key layers"),
    ('prefix = "bert."', "", "missing key prefix"),
    ("vocab_size = 30522", "", r"\[defaults\] missing key vocab_size"),
    ("{i}.attention.self.query", "0.attention.self.query", r"\[layer\] q .* must hold \{i\}"),
    ('q = "encoder', 'query = "encoder', "unknown key query"),
    ('token_type = "embeddings', 'project = "embeddings', "go together"),
    ("[config]", "[config", "cannot be read as TOML"),
]


# (file, what is replaced in it, by what, what the error says)
BROKEN_CAUSAL = [
    ("bert", 'q = "', 'q_norm = "{i}"\nq = "', "q_norm and .* k_norm go together"),
    ("bert", "[heads.pooler]", '[heads.lm]\ndecoder = "d"\n[heads.pooler]', "only a causal"),
    ("modernbert", "ffn_gate_up =", 'ffn_in = "{i}"\nffn_gate_up =', "ffn_in does not belong"),
    ("modernbert", 'activation = "classifier"', 'activation = "own"', "activation is 'own'"),
    ("modernbert", '[final]\nnorm = "final_norm"', "", r"\[final\] goes with norm_placement pre"),
    (
        "modernbert",
        'hook = "modernbert"',
        'hook = "own"',
        "hook is 'own', must be one of albert, deb",
    ),
    ("bert", "[config]", 'hook = "deberta"\n[config]', "disentangled and hook deberta go together"),
    ("deberta", 'hook = "deberta"', "", "disentangled and hook deberta go together"),
    ("deberta_v2", "relative =", "# relative =", "relative go together"),
    ("mpnet", "relative_bias_buckets =", "# ", "relative_bias_buckets go together"),
    ("qwen3", "k_norm =", "# k_norm =", "q_norm and .* k_norm go together"),
    ("opt", "project_out =", "# project_out =", "project_in and .* project_out go together"),
    (
        "llama",
        'norm = "rms_norm"',
        'norm = "l2"',
        "norm is 'l2', must be one of layer_norm, rms_no",
    ),
    ("llama", "\ncausal = true", "\ncausal = 1.5", "causal is 1.5, must be one of False, True"),
    ("gpt2", "\ncausal = true", "", "heads. lm: only a causal family may have it"),
    ("llama", 'rotary_theta = "rope_theta"', "", r"\[config\] rotary_theta is missing"),
    ("llama", '"embed_tokens.weight"', '"e"\nposition = "p"', "position does not belong to how"),
    ("llama", '"embed_tokens.weight"', '"e"\nnorm = "n"', "norm does not belong to how"),
    ("llama", "ffn_norm =", "v_norm =", "unknown key v_norm"),
    ("mistral", "biases = []", 'biases = ["o"]', "biases names o, which"),
    ("gpt2", 'qkv = "stacked"', "", r"\[layer\] q is missing"),
    ("gpt2", "intermediate_multiple = 4", "", "missing key n_inner"),
    ("opt", "project_in =", 'norm = "n"\nproject_in =', "norm does not belong to how"),
    ("gpt2", '[final]\nnorm = "ln_f"', "", r"\[final\] goes with norm_placement pre"),
    ("opt", "project_in =", "project =", "go together"),
    ("gpt_neox", 'rotary_theta = "rotary_emb_base"', 'theta = "x"', "unknown key theta"),
    ("olmo2", "attn_out_norm =", "attn_norm =", r"\[layer\] attn_out_norm is missing"),
    ("olmo2", '"output"', '"pre"', r"\[layer\] attn_norm is missing"),
    ("granite", '"pre"', '"output"', r"\[layer\] attn_out_norm is missing"),
    ("gemma3", "norm_offset = 1", "norm_offset = 2", "norm_offset is 2, must be one of 0, 1"),
    ("gemma3", '"rms_norm"', '"layer_norm"', "norm_offset does not belong to how"),
    ("gemma3", "\nwindowed_rotary_theta", "\n# ", "scaled_layers does not belong to how"),
    ("gemma3", "global_attention_period =", "# ", "global_layer does not belong to how"),
    ("gemma3", "gemma3 =", "gemma4 =", "nested names gemma4, which model_types has not"),
    ("gemma3", 'prefix = ["model.",', 'prefix = [1, "model.",', "prefix must be a text or a list"),
    (
        "bert",
        "[config]",
        '[config]\nis_causal = "layer_norm_eps"',
        "is_causal does not belong",
    ),
    ("mixtral", "expert_in =", "experts_in =", "expert_in and .* expert_out go together"),
    ("mixtral", "experts.{e}.w1", "experts.w1", r"\[sparse_layer\] expert_gate .* must hold \{e\}"),
    ("mixtral", "ffn_norm =", 'ffn_in = "{i}"\nffn_norm =', "ffn_in does not belong"),
    ("mixtral", '"pre"', '"parallel"', "goes with norm_placement pre or post"),
    ("qwen3_moe", "ffn_out =", "# ffn_out =", r"\[layer\] ffn_out is missing"),
    ("nomic_bert_moe", "experts_in =", "experts_bias2 =", "unknown key experts_bias2"),
    (
        "llama",
        "rotary_theta =",
        'sparse_period = "num_hidden_layers"\nrotary_theta =',
        "sparse_per",
    ),
    ("gte", 'k = "layers', 'key = "layers', r"\[modules.layer\] unknown key key"),
    ("gte", 'q = "layers.{i}.self_attn.q_proj"', "", r"\[modules\] \[layer\] q is missing"),
    ("gte", '"layers.{i}.mlp.up_proj"', '"layers.mlp.up"', r"\[modules\] \[layer\] ffn_in is"),
    (
        "gte",
        "[modules.embeddings]\nnorm",
        "[modules.embeddings]\nposition",
        "names position, which",
    ),
]


def broken(name: str, old: str, new: str, folder: Path) -> Path:
    text = (MODELS / f"{name}.toml").read_text()
    assert old in text
    path = folder / "own.toml"
    path.write_text(text.replace(old, new))
    return path


@pytest.mark.parametrize(
    ("old", "new", "message"), BROKEN_FAMILIES, ids=[b[1] for b in BROKEN_FAMILIES]
)
def test_broken_family(old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_family(broken("bert", old, new, tmp_path))
    assert str(tmp_path / "own.toml") in str(caught.value)


@pytest.mark.parametrize(("name", "old", "new", "message"), BROKEN_CAUSAL)
def test_broken_causal_family(name: str, old: str, new: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_family(broken(name, old, new, tmp_path))
    assert str(tmp_path / "own.toml") in str(caught.value)


BAD_CONFIGS = [
    ({}, "lacks model_type; bytetx knows: albert, bert"),
    ({"model_type": "vit"}, "has model_type 'vit'; bytetx knows: albert"),
    ({"model_type": ["bert"]}, "has model_type"),
    (BERT | {"hidden_size": "64"}, "hidden_size must be an integer from 1 to 2147483647, got '64'"),
    (BERT | {"hidden_size": 64.0}, "hidden_size must be an integer from 1 to 2147483647, got 64.0"),
    (BERT | {"hidden_size": None}, "hidden_size must be an integer from 1 to 2147483647, got None"),
    (
        BERT | {"num_hidden_layers": 0},
        "num_hidden_layers must be an integer from 1 to 2147483647, got 0",
    ),
    (
        BERT | {"num_hidden_layers": True},
        "num_hidden_layers must be an integer from 1 to 2147483647",
    ),
    (BERT | {"num_attention_heads": 5}, "hidden_size 64 is no multiple of num_attention_heads 5"),
    (BERT | {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported; known: gelu"),
    (BERT | {"hidden_act": ["gelu"]}, "hidden_act"),
    (BERT | {"layer_norm_eps": float("nan")}, "layer_norm_eps must be above 0 and at most 1"),
    (BERT | {"layer_norm_eps": 0}, "layer_norm_eps must be above 0 and at most 1"),
    (BERT | {"layer_norm_eps": 1.5}, "layer_norm_eps must be above 0 and at most 1"),
    (BERT | {"pad_token_id": -1}, "pad_token_id must be an integer from 0, got -1"),
    (BERT | {"id2label": ["a", "b"]}, "id2label must map integers to labels"),
    (BERT | {"id2label": {"first": "a"}}, "id2label must map integers to labels"),
    (BERT | {"num_labels": 10**12}, "num_labels must be an integer from 1"),
    (BERT | {"problem_type": "guess"}, "problem_type must be one of regression"),
    (BERT | {"architectures": "BertModel"}, "architectures must list class names"),
    (BERT | {"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false"),
    (BERT | {"is_decoder": True}, "runs as an encoder only"),
    (BERT | {"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key'"),
    (BERT | {"quantization_config": {"bits": 4}}, "the weights are quantised"),
    (BERT | {"quantization_config": {"quant_method": "hqq"}}, r"are quantised \(hqq\)"),
    (
        {"model_type": "roberta", "max_position_embeddings": 2},
        "max_position_embeddings 2 leaves no usable position, the family's first one is 2",
    ),
    (
        {"model_type": "mpnet", "relative_attention_num_buckets": 31},
        "relative_attention_num_buckets is 31",
    ),
]


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS, ids=[b[1][:40] for b in BAD_CONFIGS])
def test_bad_config(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_spec(config)


@given(st.sampled_from(read_families().model_types), st.data())
def test_any_config_gives_a_spec_or_a_checkpoint_error(
    model_type: str, data: st.DataObject
) -> None:
    path = next(
        MODELS / f"{one.name}.toml"
        for one in read_families().groups[0]
        if model_type in one.model_types
    )
    keys = [*tomllib.loads(path.read_text())["defaults"], "id2label", "num_labels", "architectures"]
    keys += ["problem_type", "tie_word_embeddings", "is_decoder", "position_embedding_type"]
    table = read_family(path)
    keys += [key for key in table["config"].values() if isinstance(key, str)]
    keys += [*table.get("fixed", {}), "rope_scaling", "rope_parameters", "partial_rotary_factor"]
    config = data.draw(st.dictionaries(st.sampled_from(keys), JSON, max_size=4))
    if data.draw(st.booleans()):
        config["rope_parameters"] = data.draw(ROPE)
    try:
        spec = build_spec({"model_type": model_type} | config)
    except CheckpointError:
        return
    assert isinstance(spec, ModelSpec)


def test_labels() -> None:
    assert build_spec(BERT).id2label == {0: "LABEL_0", 1: "LABEL_1"}
    assert build_spec(BERT | {"num_labels": 1}).id2label == {0: "LABEL_0"}
    labels = build_spec(BERT | {"id2label": {"10": "k", "2": "c", "0": "a"}}).id2label
    assert list(labels.items()) == [(0, "a"), (2, "c"), (10, "k")]


def test_workspace_grows_with_tokens_and_the_widest_rows() -> None:
    spec = build_spec({"model_type": "bert"})
    assert spec.workspace_bytes(0, 4) == 0
    assert spec.workspace_bytes(1000, 4) == 2 * spec.workspace_bytes(500, 4)
    wide = build_spec({"model_type": "bert", "intermediate_size": 6 * 768})
    assert wide.workspace_bytes(100, 4) > spec.workspace_bytes(100, 4)
