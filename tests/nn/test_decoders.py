"""Every causal family against transformers, on small random checkpoints, without a cache."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tiny import load, one_thread, random_ids, save, tiny_model  # noqa: F401  (one_thread is a fixture)
from tiny_decoders import DECODERS, WINDOW, CachedRun, causal_class, expected, tiny_decoder

from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.spec import build_spec
from bytetx.nn import heads
from bytetx.packed import split

TOLERANCE = 1e-4  # of the issue: last hidden states in fp32
SEQLENS = [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, 40, 3]


def assert_close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    assert actual.shape == wanted.shape
    assert (actual - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", DECODERS)
def test_hidden_states_and_logits(name: str, tmp_path: Path) -> None:
    model = tiny_decoder(name)
    loaded = load(save(model, tmp_path))
    head = heads.load_lm(loaded.spec, loaded.loader, word=loaded.transformer.embeddings.word)
    ids, layers = random_ids(SEQLENS), []
    batch = loaded.pack(ids)
    last = loaded.transformer.forward(batch, on_layer=layers.append)
    assert len(layers) == loaded.spec.num_layers + 1
    logits = split(head.forward(last), batch)
    states = [split(x, batch) for x in layers]
    for i, sequence in enumerate(ids):
        wanted = expected(model, sequence)
        for layer, rows in enumerate(states):
            if (
                rows[i].shape == wanted.hidden_states[layer][0].shape
            ):  # OPT-350m's last is projected
                assert_close(rows[i], wanted.hidden_states[layer][0])
        assert_close(logits[i], wanted.logits[0])
    assert loaded.weights.unused() == []


@pytest.mark.parametrize("name", DECODERS)
def test_base_checkpoint(name: str, tmp_path: Path) -> None:
    model = tiny_decoder(name, "Model")
    loaded = load(save(model, tmp_path), prepack=False)
    ids = random_ids([5, 17])
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert_close(rows, expected(model, sequence).last_hidden_state[0])
    assert loaded.weights.unused() == []


@pytest.mark.parametrize("name", DECODERS)
def test_pieces_and_single_rows_with_a_past(name: str, tmp_path: Path) -> None:
    """Prefill in pieces and decode rows in one step give the rows of a pass without a cache."""
    model = tiny_decoder(name)
    loaded = load(save(model, tmp_path))
    ids = random_ids([40, 11, 2, 25])
    cached = CachedRun(loaded, page_size=4)
    rows = [[] for _ in ids]
    for counts in ([7, 0, 1, 25], [13, 5, 1, 0], [20, 1, 0, 0], [0, 5, 0, 0]):
        steps = cached.step(ids, counts)
        for pieces, piece in zip(rows, steps, strict=True):
            pieces.append(piece)
    for pieces, expected_rows in zip(rows, loaded.rows(ids), strict=True):
        assert_close(torch.cat(pieces), expected_rows)


@pytest.mark.parametrize("name", ["llama3", "mistral", "gpt2", "gpt_neox", "opt-post", "gptj"])
def test_greedy_tokens(name: str, tmp_path: Path) -> None:
    model = tiny_decoder(name)
    loaded = load(save(model, tmp_path))
    head = heads.load_lm(loaded.spec, loaded.loader, word=loaded.transformer.embeddings.word)
    prompts = random_ids([1, 13, 6])
    ids, cached = [list(prompt) for prompt in prompts], CachedRun(loaded, page_size=8)
    counts = [len(prompt) for prompt in prompts]
    for _ in range(20):
        rows = cached.step(ids, counts)
        logits = head.forward(torch.stack([pieces[-1] for pieces in rows]))
        for sequence, token in zip(ids, logits.argmax(1).tolist(), strict=True):
            sequence.append(token)
        counts = [1] * len(ids)
    for prompt, sequence in zip(prompts, ids, strict=True):
        options = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
        model.generation_config.eos_token_id = None
        wanted = model.generate(torch.tensor([prompt]), pad_token_id=0, **options)
        assert sequence == wanted[0].tolist()


def test_dynamic_scaling_beyond_the_trained_positions(tmp_path: Path) -> None:
    """The length of a long text sets its frequencies; other texts of the batch do not change."""
    sizes = {"max_position_embeddings": 24}
    loaded = load(save(tiny_decoder("llama-dynamic", **sizes), tmp_path))
    assert loaded.spec.max_positions == 48
    ids = random_ids([25, 5, 48, 24])
    cached = CachedRun(loaded, page_size=8).step(ids, [25, 5, 48, 24])
    for sequence, rows, same in zip(ids, loaded.rows(ids), cached, strict=True):
        # A new model each time: transformers' keeps the frequencies of longer texts before.
        wanted = expected(tiny_decoder("llama-dynamic", **sizes), sequence).hidden_states[-1][0]
        assert_close(rows, wanted)
        assert_close(same, wanted)


@pytest.mark.parametrize("name", ["llama-linear", "llama-yarn", "llama3", "gpt2", "opt"])
def test_up_to_the_last_position(name: str, tmp_path: Path) -> None:
    model = tiny_decoder(name)
    loaded = load(save(model, tmp_path))
    longest = loaded.spec.max_positions
    assert longest == (192 if name == "llama-linear" else 96)
    ids = random_ids([longest, 1])
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert_close(rows, expected(model, sequence).hidden_states[-1][0])


def test_yarn_with_every_number_given(tmp_path: Path) -> None:
    yarn = {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, "mscale": 0.7}
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "mscale_all_dim": 1.1}
    sizes = {"original_max_position_embeddings": 12}
    model = tiny_decoder("llama", rope_parameters=rope | yarn | sizes)
    loaded = load(save(model, tmp_path))
    ids = random_ids([90])
    assert_close(loaded.rows(ids)[0], expected(model, ids[0]).hidden_states[-1][0])


def test_windows_as_older_files_have_them() -> None:
    config = {"model_type": "qwen2", "num_hidden_layers": 5, "sliding_window": 7}
    layers = build_spec(config | {"use_sliding_window": True, "max_window_layers": 3}).layer_spec
    assert [layers.window_of(i) for i in range(5)] == [0, 0, 0, 7, 7]
    layers = build_spec(config | {"use_sliding_window": False, "max_window_layers": 0}).layer_spec
    assert [layers.window_of(i) for i in range(5)] == [0] * 5


def test_falcon_of_every_kind() -> None:
    config = {"model_type": "falcon", "num_kv_heads": 71, "num_ln_in_parallel_attn": None}
    spec = build_spec(config)
    assert (spec.num_kv_heads, spec.intermediate_size) == (1, 4 * 4544)
    assert "ffn_norm" not in spec.layer and spec.layer_spec.norm_placement == "parallel"
    assert build_spec(config | {"multi_query": False}).num_kv_heads == 71
    grouped = {"hidden_size": 128, "num_attention_heads": 8, "num_kv_heads": 2}
    spec = build_spec(config | grouped | {"new_decoder_architecture": True, "parallel_attn": False})
    assert (spec.num_kv_heads, spec.layer["ffn_norm"]) == (2, "h.{i}.ln_mlp")
    assert spec.layer_spec.norm_placement == "parallel"
    layers = build_spec(config | {"alibi": True}).layer_spec
    assert layers.rotary is None and layers.alibi.scale == 64**-0.5


def test_rotary_numbers_as_older_files_have_them() -> None:
    config = {
        "model_type": "gpt_neox",
        "rotary_pct": 0.5,
        "rotary_emb_base": 500,
        "is_decoder": True,
    }
    rotary = build_spec(config | {"hidden_size": 64, "num_attention_heads": 2}).layer_spec.rotary
    assert (rotary.dim, rotary.theta, rotary.scaling) == (16, 500.0, "default")
    config = {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": None, "pad_token_id": -1}
    spec = build_spec(config | {"max_position_embeddings": 8192})
    assert (spec.layer_spec.rotary.theta, spec.max_positions, spec.pad_token_id) == (5e5, 8192, 0)
    assert spec.num_kv_heads == spec.num_heads and spec.layer_spec.rotary.dim == spec.head_dim


def test_every_choice_shows() -> None:
    """Errors would hide behind weights near zero: the smallest change of a choice must show."""
    ids = random_ids([40])[0]
    for name, changes in (
        ("gpt2", {"activation_function": "gelu"}),
        ("gpt2", {"layer_norm_epsilon": 2e-3}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("gptj", {"rotary_dim": 6}),
        ("gpt_neo", {"window_size": 7}),
        ("llama", {"rms_norm_eps": 2e-3}),
        ("opt", {"activation_function": "gelu"}),
        ("granite", {"rms_norm_eps": 2e-3}),
        ("granite", {"residual_multiplier": 0.42}),
        ("olmo2", {"rms_norm_eps": 2e-3}),
    ):
        one, other = tiny_decoder(name), tiny_decoder(name, **changes)
        difference = expected(one, ids).logits - expected(other, ids).logits
        assert difference.abs().max() > 10 * TOLERANCE, (name, changes)


def test_a_cache_goes_with_a_past(tmp_path: Path) -> None:
    loaded = load(save(tiny_decoder("llama", "Model"), tmp_path))
    cached = CachedRun(loaded, page_size=4)
    cached.step([[5, 6]], [2])
    with pytest.raises(ValueError, match="cache and batch.past must be given both, or neither"):
        loaded.transformer.forward(loaded.pack([[5]]), cache=cached.cache)
    cached.cache = replace(cached.cache, layers=cached.cache.layers[:2])
    with pytest.raises(ValueError, match="cache must have the model's 3 layers, got 2"):
        cached.step([[5, 6, 7]], [1])
    encoder = load(save(tiny_model("bert"), tmp_path / "bert"))
    with pytest.raises(ValueError, match="an encoder has no past"):
        encoder.transformer.forward(encoder.pack([[5]]), cache=cached.cache)


def test_rope_scaling_as_older_files_have_it(tmp_path: Path) -> None:
    model = tiny_decoder("llama3")
    loaded = load(save(model, tmp_path))
    config = load_config(tmp_path)
    parameters = config.pop("rope_parameters")
    theta, kind = parameters.pop("rope_theta"), parameters.pop("rope_type")
    for key in ("rope_type", "type"):
        older = config | {"rope_theta": theta, "rope_scaling": parameters | {key: kind}}
        assert build_spec(older) == loaded.spec


@pytest.mark.feature("Checkpoints", "causal families")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", DECODERS)
def test_half_is_as_close_to_float64_as_transformers(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    loaded = load(save(tiny_decoder(name).to(dtype), tmp_path), dtype)
    head = heads.load_lm(loaded.spec, loaded.loader, word=loaded.transformer.embeddings.word)
    ids = random_ids([33, 64, 5])
    # Loaded again: to(dtype) rounds the rotary frequencies, which double() does not restore.
    model = causal_class(name).from_pretrained(tmp_path, dtype=dtype)
    theirs = [expected(model, s).logits[0].double() for s in ids]
    exact_model = causal_class(name).from_pretrained(tmp_path, dtype=torch.float64)
    if build_spec(load_config(tmp_path)).experts is not None:
        exact_model.set_experts_implementation("eager")  # torch's grouped product takes no float64
    exact = torch.cat([expected(exact_model, s).logits[0] for s in ids])
    ours = head.forward(torch.cat(loaded.rows(ids))).double()
    their_error, our_error = torch.cat(theirs) - exact, ours - exact
    # Noise: half a unit in the last place of a result, which no arithmetic can beat.
    noise = exact.abs() * torch.finfo(dtype).eps / 2
    if loaded.spec.experts is not None:
        # Rounding chooses another expert for some rows, here and there, and then all differs.
        their_rows, our_rows = (error.abs().amax(1).median() for error in (their_error, our_error))
        assert our_rows <= 2 * their_rows + noise.max()
        return
    assert our_error.square().mean() <= 4 * their_error.square().mean() + noise.square().mean()
    assert our_error.abs().max() <= 2 * their_error.abs().max() + noise.max()


def test_no_text_depends_on_its_batch_mates(tmp_path: Path) -> None:
    loaded = load(save(tiny_decoder("qwen3-window"), tmp_path))
    ids = random_ids([1, 30, 9, 2])
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert torch.equal(rows, loaded.rows([sequence])[0])


def test_no_sequence_and_no_token(tmp_path: Path) -> None:
    loaded = load(save(tiny_decoder("llama-dynamic"), tmp_path))
    assert loaded.rows([]) == []
    assert [rows.shape for rows in loaded.rows([[], [5], []])] == [(0, 48), (1, 48), (0, 48)]


def test_a_tied_head_is_a_copy_where_that_is_faster_and_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(save(tiny_decoder("gpt2"), tmp_path))
    word, x = loaded.transformer.embeddings.word, torch.randn(5, 48)
    copied = heads.load_lm(loaded.spec, loaded.loader, word=word)
    assert copied.decoder.is_prepacked == loaded.loader.prepack
    monkeypatch.setattr(heads, "MAX_COPIED_HEAD_BYTES", word.nbytes - 1)
    shared = heads.load_lm(loaded.spec, loaded.loader, word=word)
    weight = shared.decoder.weight
    assert weight.untyped_storage().data_ptr() == word.untyped_storage().data_ptr()
    assert_close(copied.forward(x), shared.forward(x))


def test_log_likelihoods_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(save(tiny_decoder("qwen2"), tmp_path))
    head = heads.load_lm(loaded.spec, loaded.loader, word=loaded.transformer.embeddings.word)
    x, rows = torch.randn(15, 48), torch.tensor([0, 3, 4, 5, 9, 14, 2])
    targets = torch.randint(0, loaded.spec.vocab_size, (7,))
    wanted = head.forward(x[rows]).log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    assert_close(head.log_likelihoods(x, targets, rows=rows), wanted)
    monkeypatch.setattr(heads, "_MAX_LOGITS_BYTES", 3 * 8 * loaded.spec.vocab_size)
    assert_close(head.log_likelihoods(x, targets, rows=rows), wanted)
    assert head.log_likelihoods(x, targets[:0], rows=rows[:0]).shape == (0,)


CLASSIFIERS = [
    name
    for name, (stem, _) in DECODERS.items()
    if hasattr(transformers, f"{stem}ForSequenceClassification")
]


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_sequence_classification(name: str, tmp_path: Path) -> None:
    """The last token's logits, of any number of sequences."""
    model = tiny_decoder(name, "ForSequenceClassification", num_labels=3, pad_token_id=0)
    loaded = load(save(model, tmp_path))
    head = heads.load_sequence_classification(loaded.spec, loaded.loader)
    ids = random_ids([1, 2, 17, 40])
    batch = loaded.pack(ids)
    logits = head.classify(loaded.transformer.forward(batch), batch)
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([sequence])).logits for sequence in ids])
    assert (logits - wanted).abs().max() < 1e-4
    assert loaded.weights.unused() == []
