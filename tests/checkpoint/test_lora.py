"""Folders of LoRA adapters, against the model that peft merges."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers
from checkpoints import SENTENCES, edit_json, make_tokenizer, save_checkpoint, save_sentence_model
from safetensors.torch import load_file, save_file
from tiny import one_thread, random_ids, save, tiny_model  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import tiny_decoder
from torch import nn

import bytetx
from bytetx.checkpoint import hub as hub_module
from bytetx.errors import CheckpointError
from bytetx.executor.leader import load_on_ranks, start_ranks
from bytetx.model import Model
from bytetx.packed import pack, split

SEQLENS = [1, 7, 30]
FACTORS = "base_model.model.encoder.layer.0.attention.self.query.lora_"


def save_adapter(
    base: Path, folder: Path, kind: type = transformers.AutoModel, **config: object
) -> nn.Module:
    """Saves a random adapter of the model in `base`; returns the merged model."""
    model = peft.get_peft_model(kind.from_pretrained(base), peft.LoraConfig(**config))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3, generator=generator)
            elif parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return model.merge_and_unload().eval()


def hidden_states(model: Model, ids: list[list[int]]) -> list[torch.Tensor]:
    spec = model.spec
    batch = pack(
        ids, has_token_types=spec.num_token_types > 0, position_offset=spec.position_offset
    )
    return split(model.transformer.forward(batch), batch)


def assert_merged(model: Model, merged: nn.Module) -> None:
    """The last hidden states of `merged`, a base model without a head."""
    ids = random_ids(SEQLENS)
    for found, sequence in zip(hidden_states(model, ids), ids, strict=True):
        with torch.no_grad():
            wanted = merged(torch.tensor([sequence])).last_hidden_state[0]
        assert torch.allclose(found, wanted, rtol=0, atol=1e-4)


def differs(one: Path, other: Path) -> bool:
    """Whether two checkpoints give different hidden states."""
    ids = random_ids(SEQLENS)
    pairs = zip(*(hidden_states(load(folder), ids) for folder in (one, other)), strict=True)
    return not all(torch.allclose(a, b, atol=1e-3) for a, b in pairs)


def load(folder: Path) -> Model:
    return bytetx.load(folder, device="cpu", dtype="float32", local_files_only=True)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    return save(tiny_model("bert"), tmp_path / "base")


@pytest.fixture
def adapter(bert: Path, tmp_path: Path) -> Path:
    save_adapter(bert, tmp_path / "adapter", target_modules=["query"])
    return tmp_path / "adapter"


@pytest.mark.feature("Checkpoints", "DoRA, rsLoRA and trained biases")
@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["query", "value"], "r": 4, "lora_alpha": 12},
        {"target_modules": "all-linear", "use_rslora": True, "lora_alpha": 5},
        {
            "target_modules": r".*layer\.\d+\.(attention\.self\.key|output\.dense)",
            "rank_pattern": {"key": 2, r"layer\.1\.output\.dense": 3},
            "alpha_pattern": {r"^encoder\.layer\.0.*key": 40, "output.dense": 1.5},
        },
        {"target_modules": ["dense"], "layers_to_transform": [1], "init_lora_weights": "gaussian"},
        {"target_modules": ["word_embeddings", "query"], "r": 5},
        {"target_modules": ["query"], "modules_to_save": ["output.dense", "embeddings.LayerNorm"]},
        {"target_modules": ["query", "output.dense"], "bias": "lora_only"},
        {"target_modules": ["query", "value"], "bias": "all", "modules_to_save": ["pooler"]},
        {"target_modules": "all-linear", "lora_bias": True, "bias": "lora_only", "lora_alpha": 12},
        {"target_modules": ["query", "word_embeddings", "output.dense"], "use_dora": True},
        {
            "target_modules": ["query", "key"],
            **{"use_dora": True, "use_rslora": True, "bias": "all"},
            **{"rank_pattern": {"key": 2}, "alpha_pattern": {"query": 3}},
        },
    ],
    ids=["list", "rslora", "patterns", "layers", "embedding", "modules_to_save"]
    + ["lora_only", "all_biases", "lora_bias", "dora", "dora_patterns"],
)
def test_bert(config: dict[str, object], bert: Path, tmp_path: Path) -> None:
    merged = save_adapter(bert, tmp_path / "adapter", **config)
    assert_merged(load(tmp_path / "adapter"), merged)
    assert differs(tmp_path / "adapter", bert)


@pytest.mark.parametrize("kind", [{}, {"use_dora": True}, {"lora_bias": True, "bias": "all"}])
def test_weights_saved_as_inputs_by_outputs(kind: dict[str, object], tmp_path: Path) -> None:
    base = save(tiny_decoder("gpt2", "Model"), tmp_path / "base")
    config = {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
    merged = save_adapter(base, tmp_path / "adapter", **config, **kind)
    assert_merged(load(tmp_path / "adapter"), merged)
    assert differs(tmp_path / "adapter", base)


@pytest.mark.parametrize("family", ["gte", "jina_embeddings_v3", "nomic_bert"])
@pytest.mark.parametrize("kind", [{"use_dora": True}, {"lora_bias": True, "bias": "all"}])
def test_files_that_stack_what_the_modules_separate(
    family: str, kind: dict[str, object], tmp_path: Path
) -> None:
    model = tiny_model(family)
    base = save(model, tmp_path / "base")
    targets = ["q_proj", "v_proj", "o_proj"]
    if family == "nomic_bert" and "lora_bias" in kind:
        kind = {"bias": "all"}
    merged = save_adapter(base, tmp_path / "adapter", target_modules=targets, **kind)
    assert_merged(load(tmp_path / "adapter"), merged)
    assert differs(tmp_path / "adapter", base)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_start_from_the_weights_saved_as_a_plain_adapter(
    start: str, bert: Path, tmp_path: Path
) -> None:
    """peft saves the difference to the start, with twice the rank."""
    kind = transformers.AutoModel.from_pretrained(bert)
    config = peft.LoraConfig(target_modules=["query"], init_lora_weights=start, r=4)
    model = peft.get_peft_model(kind, config)
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = start
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(tmp_path / "raw")
    with pytest.raises(CheckpointError, match=f"init_lora_weights '{start}'.*_for_weight_conv"):
        load(tmp_path / "raw")
    options = {"path_initial_model_for_weight_conversion": str(tmp_path / "start")}
    model.save_pretrained(tmp_path / "adapter", **options)
    merged, ids = load(tmp_path / "adapter"), random_ids(SEQLENS)
    assert_merged(merged, model.merge_and_unload().eval())
    assert differs(tmp_path / "adapter", bert)
    options = {"device": "cpu", "dtype": "float32", "adapters": {"a": tmp_path / "adapter"}}
    beside = bytetx.load(bert, **options).hidden_states(ids, adapter="a")
    pairs = zip(beside, hidden_states(merged, ids), strict=True)
    assert all(np.allclose(a, b, rtol=0, atol=1e-4) for a, b in pairs)


def test_biases_where_the_base_model_has_none(tmp_path: Path) -> None:
    base = save(tiny_decoder("llama", "Model"), tmp_path / "base")
    model = transformers.AutoModel.from_pretrained(base)
    config = peft.LoraConfig(target_modules=["q_proj"], lora_bias=True)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="q_proj.bias', a bias that .* lacks.*adapters={"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize("bias", ["none", "all"])
def test_a_classifier_and_its_new_head(bias: str, tmp_path: Path) -> None:
    """The names of the tensors have the prefix of the model with a head."""
    base = save_checkpoint(tmp_path / "base", head="ForSequenceClassification")
    merged = save_adapter(
        base,
        tmp_path / "adapter",
        transformers.AutoModelForSequenceClassification,
        task_type="SEQ_CLS",
        target_modules=["query", "key"],
        bias=bias,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    texts = [text for text in SENTENCES if text]
    for text, labels in zip(texts, load(tmp_path / "adapter").classify(texts), strict=True):
        with torch.no_grad():
            wanted = merged(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        found = {label.label: label.score for label in labels}
        assert np.allclose([found[f"LABEL_{i}"] for i in range(3)], wanted, atol=1e-4)


@pytest.mark.feature("Checkpoints", "LoRA adapters")
def test_a_decoder_generates_as_the_merged_model(tmp_path: Path) -> None:
    base = save(tiny_decoder("qwen3", tie_word_embeddings=False), tmp_path / "base")
    merged = save_adapter(
        base,
        tmp_path / "adapter",
        transformers.AutoModelForCausalLM,
        task_type="CAUSAL_LM",
        target_modules=["q_proj", "v_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"],
    )
    prompts = random_ids(SEQLENS)
    params = bytetx.SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    for prompt, output in zip(
        prompts, load(tmp_path / "adapter").generate(prompts, params), strict=True
    ):
        with torch.no_grad():
            wanted = merged.generate(
                torch.tensor([prompt]), max_new_tokens=6, min_new_tokens=6, do_sample=False
            )
        assert output.token_ids == wanted[0, len(prompt) :].tolist()


def test_an_adapter_of_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    base = save(tiny_decoder("llama-tied"), tmp_path / "base")
    save_adapter(
        base,
        tmp_path / "adapter",
        transformers.AutoModelForCausalLM,
        task_type="CAUSAL_LM",
        target_modules=["lm_head"],
    )
    with pytest.raises(CheckpointError, match="changes 1 tensors that the base .*: lm_head.weight"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {}),
        ("llama", {"use_dora": True}),
        ("gpt2", {}),
        ("gpt2", {"use_dora": True, "bias": "all"}),
        ("gpt2", {"lora_bias": True, "bias": "lora_only"}),
    ],
)
def test_shards_of_merged_weights(name: str, config: dict[str, object], tmp_path: Path) -> None:
    base = save(tiny_decoder(name), tmp_path / "base")
    save_adapter(
        base,
        tmp_path / "adapter",
        transformers.AutoModelForCausalLM,
        task_type="CAUSAL_LM",
        target_modules="all-linear",
        **config,
    )
    workers, group = start_ranks(2, torch.device("cpu"))
    try:
        folder = tmp_path / "adapter"
        shared = Model(load_on_ranks(folder, group, workers, dtype=torch.float32))
        ids = random_ids([3, 30])
        pairs = zip(*(hidden_states(m, ids) for m in (shared, load(folder))), strict=True)
        assert all(torch.allclose(a, b, rtol=0, atol=1e-4) for a, b in pairs)
    finally:
        workers.close()


def test_half_weights_are_rounded_once(bert: Path, adapter: Path) -> None:
    """The sum of f16 weights and an f32 adapter, in f32, not rounded to f16 and back."""
    half = transformers.AutoModel.from_pretrained(bert).half()
    half.save_pretrained(bert)
    merged = peft.PeftModel.from_pretrained(half.float(), adapter).merge_and_unload().eval()
    assert_merged(load(adapter), merged)
    name = "encoder.layer.0.attention.self.query.weight"
    weight = merged.state_dict()[name]
    assert not torch.equal(weight, weight.half().float())


def test_a_sentence_transformer_with_an_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

    # transformers 5.24 asks for a peft that is not released yet, and works with the last one.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", peft.__version__)
    modules = [Pooling(48, "cls"), Dense(48, 20), Normalize()]
    base = save_sentence_model(tmp_path / "base", modules, max_seq_length=12)
    model = SentenceTransformer(str(base), device="cpu", prompts={"query": "of: "})
    model.add_adapter(peft.LoraConfig(task_type="FEATURE_EXTRACTION", target_modules=["query"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    model.save_pretrained(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter" / "config.json").exists()
    loaded = load(tmp_path / "adapter")
    options = {"prompt_name": "query"}
    found = loaded.embed(SENTENCES, truncate=True, **options)
    assert np.allclose(found, model.encode(SENTENCES, **options), atol=1e-4)
    assert not np.allclose(found, load(base).embed(SENTENCES, truncate=True), atol=1e-2)


def test_the_tokenizer_and_the_pooling_of_the_base(tmp_path: Path) -> None:
    """Without its own modules.json or tokenizer, an adapter has those of its base model."""
    from sentence_transformers.sentence_transformer.modules import Pooling

    base = save_sentence_model(tmp_path / "base", [Pooling(48, "max")])
    folder = tmp_path / "adapter"
    save_adapter(base, folder, target_modules=["query"])
    model = load(folder)
    assert model.checkpoint.sentence.pooling == ("max",)
    assert model.checkpoint.folder == folder
    make_tokenizer("bpe").save_pretrained(folder)
    own = load(folder).tokenizer
    assert own.token(own.mask_token_id) == "<mask>"
    assert model.tokenizer.token(model.tokenizer.mask_token_id) == "[MASK]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'; bytetx merges LORA only"),
        ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
        ({"peft_type": None}, "peft_type None"),
        ({"use_dora": True}, "lacks lora_magnitude_vector of 'encoder.layer.0"),
        ({"use_dora": "yes"}, "use_dora must be"),
        ({"bias": "some"}, "bias 'some', which bytetx does not know"),
        ({"lora_bias": True}, "lacks lora_B.bias of 'encoder.layer.0"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights 'loftq', which changes the base"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa', which changes the base"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"target_parameters": ["experts"]}, "target_parameters"),
        ({"an_option_of_2030": 1}, "an_option_of_2030 1, an option that bytetx does not know"),
        ({"target_modules": ["key"]}, "changes the module .*query', which is not in target_mod"),
        ({"r": 3}, r"have shapes \(8, 48\) and \(48, 8\), adapter_config.json says rank 3"),
        ({"r": 0}, "r must be an integer from 1 to 65536, got 0"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number from 0"),
        ({"rank_pattern": {"query": 2}}, "says rank 2"),
        ({"alpha_pattern": {"(": 2}}, "the pattern '\\(', which is no regular expression"),
        ({"alpha_pattern": {"(a+)+": 2}}, "none of them of a group"),
        ({"alpha_pattern": {".*.*.*": 2}}, "at most two repetitions"),
        ({"base_model_name_or_path": None}, "names no base_model_name_or_path; write the folder"),
        ({"base_model_name_or_path": "/nowhere/at/all"}, "there is no folder /nowhere/at/all.*"),
        ({"base_model_name_or_path": "someone/model"}, "not in the local hub cache.*; write the"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_configs_that_are_refused(change: dict[str, object], message: str, adapter: Path) -> None:
    edit_json(adapter / "adapter_config.json", **change)
    with pytest.raises(
        CheckpointError, match=f"adapter_(config.json|model.safetensors).*{message}"
    ):
        load(adapter)


def drop(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def put(**added: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update(
        {name.replace("__", "."): tensor for name, tensor in added.items()}
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop(f"{FACTORS}A.weight"), "lacks lora_A of 'encoder.layer.0.attention.self.query'"),
        (drop(f"{FACTORS}B.weight"), "lacks lora_B of"),
        (put(base_model__model__encoder__x__weight=torch.ones(2)), "changes 1 tensors that the"),
        (
            put(base_model__model__pooler__dense__bias=torch.ones(2)),
            r"changes 'pooler.dense.bias' by a tensor of shape \(2,\).*has shape \(48,\)",
        ),
        (put(encoder__weight=torch.ones(2)), "'encoder.weight' is none of a plain LoRA adapter"),
        (put(base_model__model__a__lora_C__bias=torch.ones(2)), "is none of a plain"),
        (
            put(base_model__model__a__query__lora_magnitude_vector=torch.ones(2)),
            "lacks lora_A of 'a.query'",
        ),
        (
            put(**{f"{FACTORS}B.bias": torch.ones(48)}),
            "has lora_B.bias of .*, which adapter_config.json does not speak of",
        ),
        (
            put(**{f"{FACTORS[:-5]}base_layer.bias": torch.ones(47)}),
            r"changes 'encoder.layer.0.attention.self.query.bias' by a tensor of shape \(47,\)",
        ),
        (lambda tensors: tensors.clear(), "holds no tensors"),
        (
            put(**{f"{FACTORS}A.weight": torch.ones(8, 48, 1, 1)}),
            "or, if it is of a convolution, merge the two",
        ),
        (
            put(**{f"{FACTORS}A.weight": torch.ones(8, 47)}),
            r"changes 'encoder.layer.0.attention.self.query.weight' by a tensor of shape \(48, 47",
        ),
        (
            put(**{f"{FACTORS[:-6]}.weight": torch.ones(48, 48)}),
            "changes 'encoder.layer.0.attention.self.query.weight' twice",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "change",
)
def test_tensors_that_are_refused(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, adapter: Path
) -> None:
    path = adapter / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=f"adapter_model.safetensors.*{message}"):
        load(adapter)


def test_keys_that_are_null_count_as_absent(bert: Path, tmp_path: Path) -> None:
    """In peft's config, whose default of both is 8."""
    save_adapter(bert, tmp_path / "adapter", target_modules=["query"], r=8, lora_alpha=8)
    wanted = load(tmp_path / "adapter").embed([[1, 2, 3]]).vectors
    nothing = dict.fromkeys(("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora"))
    edit_json(tmp_path / "adapter" / "adapter_config.json", **nothing)
    np.testing.assert_array_equal(load(tmp_path / "adapter").embed([[1, 2, 3]]).vectors, wanted)


def test_lengths_of_another_layer_are_refused(bert: Path, tmp_path: Path) -> None:
    save_adapter(bert, tmp_path / "adapter", target_modules=["query"], use_dora=True)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors[f"{FACTORS}magnitude_vector"] = torch.ones(47)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"lora_magnitude_vector of .* has shape \(47,\)"):
        load(tmp_path / "adapter")


def test_an_adapter_without_its_tensors(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="adapter_model.bin, a pickle file.*is refused"):
        load(adapter)
    (adapter / "adapter_model.bin").unlink()
    with pytest.raises(CheckpointError, match="has no adapter_model.safetensors; give the folder"):
        load(adapter)


def test_an_adapter_of_an_adapter(adapter: Path) -> None:
    edit_json(adapter / "adapter_config.json", base_model_name_or_path=str(adapter))
    with pytest.raises(CheckpointError, match="is an adapter, too; "):
        load(adapter)


def test_a_base_model_on_the_hub(
    bert: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(repo: str, **options: object) -> str:
        asked.append((repo, options["revision"], options["local_files_only"]))
        return str(bert)

    wanted = hidden_states(load(adapter), random_ids(SEQLENS))
    monkeypatch.setattr(hub_module, "snapshot_download", download)
    config = {"base_model_name_or_path": "someone/model", "revision": "v2"}
    edit_json(adapter / "adapter_config.json", **config)
    found = hidden_states(bytetx.load(adapter, device="cpu"), random_ids(SEQLENS))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert asked[0] == ("someone/model", "v2", False)
    assert all(local for _, _, local in asked[1:])
