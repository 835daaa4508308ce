"""NeoMME's text: factorised words, plain norms, mixed embeddings, changed attention, its heads."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from checkpoints import SENTENCES, edit_json, make_tokenizer
from tiny import VOCAB_SIZE, half_errors, load, one_thread, random_ids, randomize, save  # noqa: F401  (autouse)
from torch import nn

import bytetx
from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import CheckpointError, InputError
from bytetx.hf import FallbackWarning
from bytetx.nn import cpu_steps, heads, one_sequence
from bytetx.nn.grid_blocks import check_grid
from bytetx.packed import split
from bytetx.parallel.grid import Grid

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "NeoMMEModel"), reason="an older transformers"
)
SHORT, LONG = 2, 9
SEQLENS = [1, 2, SHORT, SHORT + 1, SHORT + 2, LONG, LONG + 1, LONG + 2, 40, 3]
# Windows of two sizes, and layers without one that are neighbours.
WINDOWS = [SHORT, LONG, None, SHORT, None, None]
SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": VOCAB_SIZE,
    "embedding_rank": 20,
    "max_position_embeddings": 96,
    "sliding_window": LONG,
    "patch_size": 2,
    "embedding_dim": 12,
    "layer_types": ["sliding_attention" if window else "full_attention" for window in WINDOWS],
    "per_layer_config": {
        i: {"sliding_window": window} for i, window in enumerate(WINDOWS) if window != LONG
    },
}


def tiny(head: str = "Model", **config: object) -> nn.Module:
    sizes = transformers.NeoMMEConfig(**SIZES | config)
    model = getattr(transformers, f"NeoMME{head}")(sizes)
    randomize(model)
    return model.eval()


def expected(model: nn.Module, ids: list[int]) -> object:
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True)


def test_every_layer(tmp_path: Path) -> None:
    model = tiny()
    loaded, ids, layers = load(save(model, tmp_path)), random_ids(SEQLENS), []
    wanted = tuple(window + 1 if window else 0 for window in WINDOWS)
    assert loaded.spec.layer_spec.windows == wanted
    batch = loaded.pack(ids)
    loaded.transformer.forward(batch, on_layer=layers.append)
    states = [split(x, batch) for x in layers]
    for i, sequence in enumerate(ids):
        for own, theirs in zip(states, expected(model, sequence).hidden_states, strict=True):
            assert (own[i] - theirs[0]).abs().max() < 1e-4
        assert torch.equal(own[i], loaded.rows([sequence])[0])
    assert all(name.startswith("patch_embeddings.") for name in loaded.weights.unused())


@pytest.mark.parametrize(
    "config",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"embedding_rank": 48, "residual_multiplier": 1.0},
        {"num_key_value_heads": 4, "num_attention_heads": 4},
        {"num_key_value_heads": 1, "residual_multiplier": 0.3},
        {"layer_types": ["full_attention"] * 6, "per_layer_config": {}, "sliding_window": None},
        {"rope_parameters": {"full_attention": {"rope_theta": 300.0, "partial_rotary_factor": 1}}},
    ],
)
def test_other_sizes(config: dict[str, object], tmp_path: Path) -> None:
    model = tiny(**config)
    loaded, ids = load(save(model, tmp_path)), random_ids(SEQLENS)
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert (rows - expected(model, sequence).last_hidden_state[0]).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_err_no_more_than_transformers(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny().to(dtype)
    ours, theirs = half_errors(load(save(model, tmp_path), dtype), model)
    assert ours < 1.1 * theirs


@pytest.mark.parametrize("is_tied", [True, False])
def test_masked_language_model(is_tied: bool, tmp_path: Path) -> None:
    model = tiny("ForMaskedLM", tie_word_embeddings=is_tied)
    loaded, ids = load(save(model, tmp_path)), random_ids(SEQLENS)
    head = heads.load_masked_lm(loaded.spec, loaded.loader)
    batch = loaded.pack(ids)
    logits = split(head.forward(loaded.transformer.forward(batch)), batch)
    for sequence, rows in zip(ids, logits, strict=True):
        assert (rows - expected(model, sequence).logits[0]).abs().max() < 1e-4
    assert all("patch_embeddings." in name for name in loaded.weights.unused())


def test_what_a_config_may_leave_out(tmp_path: Path) -> None:
    spec, config = build_spec({"model_type": "neomme"}), transformers.NeoMMEConfig()
    assert spec == build_spec(config.to_dict() | {"architectures": None})
    radii = [layer.sliding_window for layer in config.per_layer_config]
    assert spec.layer_spec.windows == tuple(radius + 1 if radius else 0 for radius in radii)
    assert spec.layer_spec.value_table.layers == {5, 16}
    assert (spec.layer_spec.rotary.dim, spec.layer_spec.windowed_rotary.dim) == (16, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_layer_config": {"0": {"head_dim": 8}}}, "must give layer 0 sliding_window alone"),
        ({"per_layer_config": {"0": {"sliding_window": None}}}, "layer 0 must be a positive int"),
        ({"per_layer_config": {"2": {"sliding_window": 3}}}, "layer 2 must be null"),
        ({"per_layer_config": {"first": {}}}, "must have a table for each layer"),
        ({"layer_types": ["sliding_attention"] * 6}, "must have a layer of full_attention"),
        ({"rope_parameters": {"full_attention": 3}}, "full_attention must be a table"),
        (
            {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.4}}},
            "rotates 6 features of a head; they must be a multiple of 4",
        ),
        ({"residual_multiplier": -1.0}, "residual_multiplier must be a positive number"),
    ],
)
def test_what_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    config = load_config(save(tiny(), tmp_path))
    with pytest.raises(CheckpointError, match=message):
        build_spec(config | change)


@pytest.mark.parametrize("module", ["up_proj", "gate_proj"])
def test_adapters(module: str, tmp_path: Path) -> None:
    """Merged, whatever they change; of single requests, attention and feed-forward alone."""
    peft = pytest.importorskip("peft")
    tokenizer = make_tokenizer("bpe", max_tokens=96)
    base = tiny(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    save(base, tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(target_modules=["q_proj", module], init_lora_weights=False)
    adapted = peft.get_peft_model(base, lora).eval()
    adapted.save_pretrained(tmp_path / "adapter")
    names = {"base_model_name_or_path": str(tmp_path / "base")}
    edit_json(tmp_path / "adapter" / "adapter_config.json", **names)
    ids = tokenizer(SENTENCES[0])["input_ids"]
    wanted = expected(adapted, ids).last_hidden_state[0].mean(0).numpy()
    options = {"pooling": "mean", "normalize": False}
    merged = bytetx.load(tmp_path / "adapter", device="cpu").embed(SENTENCES[:1], **options)
    assert np.abs(merged.vectors[0] - wanted).max() < 1e-4
    adapters = {"own": tmp_path / "adapter"}
    if module == "gate_proj":
        with pytest.raises(CheckpointError, match="changes '.*gate_proj.weight' and 5 more"):
            bytetx.load(tmp_path / "base", device="cpu", adapters=adapters)
        return
    model = bytetx.load(tmp_path / "base", device="cpu", adapters=adapters)
    found = model.embed(SENTENCES[:1], adapter="own", **options)
    assert np.abs(found.vectors[0] - wanted).max() < 1e-4


def test_native_steps_compute_none_of_it(tmp_path: Path) -> None:
    for model_type in ("neomme", "embedding_gemma2_text"):
        layers = build_spec({"model_type": model_type}).layer_spec
        assert not any(layers.chooses_only(m._CHOICES) for m in (cpu_steps, one_sequence))


def test_ranks_have_no_part_of_a_layer(tmp_path: Path) -> None:
    spec = load(save(tiny(), tmp_path)).spec
    for axis in "xyz":
        with pytest.raises(InputError, match="use data"):
            check_grid(spec, Grid(**{axis: 2}))


def test_a_square_of_relu_in_families_with_a_gate() -> None:
    with pytest.raises(CheckpointError, match="this family's gate must be one of"):
        build_spec({"model_type": "llama", "hidden_act": "relu2"})


@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForRetrieval"])
def test_wrap(head: str, recwarn: pytest.WarningsRecorder) -> None:
    stock = tiny(head)
    wrapped = bytetx.wrap(copy.deepcopy(stock))
    ids = random_ids(SEQLENS)
    width = max(SEQLENS)
    inputs = torch.tensor([own + [0] * (width - len(own)) for own in ids])
    mask = torch.tensor([[1] * len(own) + [0] * (width - len(own)) for own in ids])
    with torch.no_grad():
        have, want = (
            m(input_ids=inputs, attention_mask=mask, output_hidden_states=True)
            for m in (wrapped, stock)
        )
    name = {"Model": "last_hidden_state", "ForMaskedLM": "logits", "ForRetrieval": "embeddings"}
    pairs = [(have[name[head]], want[name[head]])]
    pairs += list(zip(have.hidden_states, want.hidden_states, strict=True))
    if head == "ForRetrieval":
        assert (have.dense_embeddings - want.dense_embeddings).abs().max() < 1e-4
    for own, theirs in pairs:
        assert ((own - theirs) * mask[..., None]).abs().max() < 1e-4
    assert [str(w.message) for w in recwarn if issubclass(w.category, FallbackWarning)] == []


@torch.no_grad()
def test_wrap_reads_every_weight_again() -> None:
    """Whatever a plan has computed of a parameter, a change of it is seen."""
    stock = tiny()
    wrapped = bytetx.wrap(copy.deepcopy(stock))
    inputs = torch.tensor(random_ids([17]))
    before = wrapped(input_ids=inputs).last_hidden_state
    names = [name for name, _ in stock.named_parameters() if "patch_embeddings" not in name]
    for name in names:
        for model in (stock, wrapped):
            model.get_parameter(name).mul_(0.5).add_(0.1)
        after = wrapped(input_ids=inputs).last_hidden_state
        assert not torch.equal(before, after), name
        assert (after - stock(input_ids=inputs).last_hidden_state).abs().max() < 1e-4, name
        before = after


def test_wrap_leaves_images_to_transformers() -> None:
    stock = tiny()
    wrapped = bytetx.wrap(copy.deepcopy(stock))
    inputs = torch.tensor(random_ids([7]))
    positions = torch.stack([torch.arange(7), torch.arange(7).flip(0)])[:, None]
    with pytest.warns(FallbackWarning), torch.no_grad():
        have = wrapped(input_ids=inputs, position_ids=positions).last_hidden_state
        want = stock(input_ids=inputs, position_ids=positions).last_hidden_state
    assert torch.equal(have, want)


def save_retrieval(folder: Path) -> tuple[Path, nn.Module]:
    tokenizer = make_tokenizer("bpe", max_tokens=96)
    sizes = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    model = tiny("ForRetrieval", **sizes)
    save(model, folder)
    tokenizer.save_pretrained(folder)
    return folder, model


def vectors_of(model: nn.Module, folder: Path, text: str) -> object:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return expected(model, tokenizer(text)["input_ids"])


@pytest.mark.parametrize("has_modules", [False, True])
def test_retrieval(has_modules: bool, tmp_path: Path) -> None:
    """Vectors of tokens as the class gives them, and of texts as its other head does."""
    folder, model = save_retrieval(tmp_path)
    prompts = {}
    if has_modules:
        prompts = {"query": "the query: ", "document": ""}
        kinds = ["base.modules.transformer.Transformer", "multi_vector_encoder.modules."]
        kinds[1] += "multi_vector_mask.MultiVectorMask"
        entries = [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
            for i, (path, kind) in enumerate(zip(("", "1_MultiVectorMask"), kinds, strict=True))
        ]
        (folder / "modules.json").write_text(json.dumps(entries))
        (folder / "1_MultiVectorMask").mkdir()
        (folder / "1_MultiVectorMask" / "config.json").write_text('{"skiplist_words": []}')
        modality = {"method": "forward", "method_output_name": "embeddings"}
        settings = {"transformer_task": "retrieval", "module_output_name": "token_embeddings"}
        settings["modality_config"] = {"text": modality, "image": modality}
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
        config = {"model_type": "MultiVectorEncoder", "prompts": prompts}
        (folder / "config_sentence_transformers.json").write_text(json.dumps(config))
    loaded = bytetx.load(folder, device="cpu")
    for task in ("query", "document"):
        found = loaded.embed_tokens(SENTENCES, task=task)
        for text, vectors in zip(SENTENCES, found, strict=True):
            wanted = vectors_of(model, folder, prompts.get(task, "") + text)
            assert np.abs(vectors - wanted.embeddings[0].numpy()).max() < 1e-4
    dense = np.asarray(loaded.embed(SENTENCES, pooling="mean", normalize=True))
    for text, vector in zip(SENTENCES, dense, strict=True):
        wanted = vectors_of(model, folder, text).dense_embeddings[0].numpy()
        assert np.abs(vector - wanted).max() < 1e-4
