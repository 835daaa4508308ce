"""Gemma: bidirectional windows, files of older and of nested configs, what is rounded where."""

from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import edit_json
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, load, one_thread, random_ids, randomize, save  # noqa: F401  (autouse)
from tiny_decoders import DECODERS, WINDOW, expected, tiny_decoder

import bytetx
from bytetx.checkpoint.files import load_config
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import CheckpointError, InputError, OptionError
from bytetx.nn.loading import resolve_dtype, saved_dtype

TOLERANCE = 1e-4  # of the issue: last hidden states in fp32
SEQLENS = [1, 2, WINDOW // 2, WINDOW, WINDOW + 1, WINDOW + 2, 40, 3]


def assert_same_rows(folder: Path, model: torch.nn.Module, seqlens: list[int]) -> None:
    loaded, ids = load(folder), random_ids(seqlens)
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        wanted = expected(model, sequence).hidden_states[-1][0]
        assert rows.shape == wanted.shape
        assert (rows - wanted).abs().max() < TOLERANCE


@pytest.mark.parametrize("window", [1, 2, 7, WINDOW, 64])
@pytest.mark.parametrize("is_causal", [None, False])
def test_a_window_without_the_causal_mask(
    window: int, is_causal: bool | None, tmp_path: Path
) -> None:
    """transformers halves the window where use_bidirectional_attention says so, and counts it once
    more where is_causal does."""
    options = {"sliding_window": window, "use_bidirectional_attention": True}
    options |= {} if is_causal is None else {"is_causal": is_causal}
    model = tiny_decoder("gemma3", "Model", **options)
    folder = save(model, tmp_path)
    edit_json(folder / "config.json", sliding_window=window)  # it saves odd ones as even
    spec = load(folder).spec
    assert spec.is_bidirectional and "lm" not in spec.heads
    assert_same_rows(folder, model, SEQLENS)
    ids = random_ids(SEQLENS)
    width = max(SEQLENS)
    padded = torch.tensor([[0] * (width - len(own)) + own for own in ids])
    mask = torch.tensor([[0] * (width - len(own)) + [1] * len(own) for own in ids])
    with torch.no_grad():
        wanted = model(padded, attention_mask=mask).last_hidden_state
    for rows, own in zip(load(folder).rows(ids), wanted, strict=True):
        assert (rows - own[width - len(rows) :]).abs().max() < TOLERANCE


def test_a_window_in_a_config_that_only_takes_the_mask_away(tmp_path: Path) -> None:
    for name in ("gemma2", "gemma3"):
        model = tiny_decoder(name, "Model", is_causal=False)
        assert_same_rows(save(model, tmp_path / name), model, SEQLENS)


@pytest.mark.parametrize("pattern", [2, 3, 6])
def test_gemma3_files_before_layer_types(pattern: int, tmp_path: Path) -> None:
    """rope_scaling is of the layers without a window; max_position_embeddings counts it already."""
    options = {"num_hidden_layers": 4, "sliding_window_pattern": pattern}
    model = tiny_decoder("gemma3", "Model", **options)
    folder = save(model, tmp_path)
    config = load_config(folder)
    new = build_spec(config)
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        config.pop(key, None)
    config |= {"sliding_window_pattern": pattern, "rope_theta": 2000.0}
    config |= {"rope_local_base_freq": 300.0}
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert build_spec(config) == new
    assert new.layer_spec.window_pattern == tuple((i + 1) % pattern > 0 for i in range(4))
    assert new.max_positions == 96
    assert (new.layer_spec.rotary.factor, new.layer_spec.windowed_rotary.factor) == (4.0, 1.0)
    assert_same_rows(folder, model, [40, 1])


def test_the_first_gemma_files(tmp_path: Path) -> None:
    """hidden_act "gelu" means the tanh; Gemma 2 has a window in every second layer."""
    folder = save(tiny_decoder("gemma"), tmp_path / "one")
    spec = build_spec(load_config(folder))
    edit_json(folder / "config.json", hidden_act="gelu", hidden_activation=None)
    assert build_spec(load_config(folder)) == spec and spec.activation == "gelu_tanh"
    config = load_config(save(tiny_decoder("gemma2"), tmp_path / "two"))
    spec = build_spec(config)
    for key in ("layer_types", "rope_parameters"):
        del config[key]
    assert build_spec(config) == spec
    assert spec.layer_spec.window_pattern == (True, False, True)
    assert (spec.layer_spec.softcap, spec.logits_softcap) == (3.0, 4.0)
    plain = build_spec({"model_type": "gemma2"})
    assert (plain.layer_spec.softcap, plain.logits_softcap) == (50.0, 30.0)
    assert plain.layer_spec.softmax_scale == 1 / 16


def test_a_cap_that_transformers_does_not_apply_is_refused() -> None:
    with pytest.raises(CheckpointError, match="attn_logit_softcapping is 50.0, which bytetx"):
        build_spec({"model_type": "gemma3_text", "attn_logit_softcapping": 50.0})


def with_images(folder: Path) -> torch.nn.Module:
    """A random Gemma 3 that reads images beside texts."""
    text = DECODERS["gemma3"][1] | {"vocab_size": VOCAB_SIZE}
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"intermediate_size": 16, "image_size": 16, "patch_size": 4}
    tokens = {"image_token_index": 4, "boi_token_index": 1, "eoi_token_index": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    randomize(model)
    save(model.eval(), folder)
    return model


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_checkpoint_with_images(prefix: str, tmp_path: Path) -> None:
    model = with_images(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    own = "language_model.model."
    assert any(name.startswith(own) for name in tensors)
    renamed = {prefix + k.removeprefix(own) if own in k else k: v for k, v in tensors.items()}
    save_file(renamed, path, metadata={"format": "pt"})
    ids = random_ids([1, WINDOW + 3, 33])
    loaded = bytetx.load(tmp_path, device="cpu", dtype="float32")
    assert {name.split("_")[0] for name in loaded.checkpoint.unused_tensors} == {"vision", "multi"}
    for rows, sequence in zip(loaded.hidden_states(ids), ids, strict=True):
        with torch.no_grad():
            wanted = model.model(torch.tensor([sequence])).last_hidden_state[0]
        assert (torch.as_tensor(rows) - wanted).abs().max() < TOLERANCE
    params = bytetx.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    for answer, sequence in zip(loaded.generate(ids, params), ids, strict=True):
        row = model.generate(
            torch.tensor([sequence]), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        assert answer.token_ids == row[0, len(sequence) :].tolist()


def test_a_config_without_its_text_model(tmp_path: Path) -> None:
    """Without the table, all of it is transformers' default, which the tensors are not of."""
    with_images(tmp_path)
    edit_json(tmp_path / "config.json", text_config=None, hidden_size=48)
    with pytest.raises(CheckpointError, match="the checkpoint lacks 299 tensors: layers.3"):
        load(tmp_path)
    edit_json(tmp_path / "config.json", text_config="here")
    with pytest.raises(CheckpointError, match="text_config must be a table, the config of the te"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3"])
def test_auto_is_bfloat16_on_a_gpu(name: str, tmp_path: Path) -> None:
    folder = save(tiny_decoder(name), tmp_path)
    saved = saved_dtype(folder, build_spec(load_config(folder)))
    assert resolve_dtype("auto", torch.device("cuda"), saved=saved) == torch.bfloat16
    assert resolve_dtype("auto", torch.device("cpu"), saved=saved) == torch.float32


def test_gpus_before_ampere_take_float16_and_refuse_bfloat16(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    gpu, saved = torch.device("cuda", 0), torch.bfloat16
    assert resolve_dtype("auto", gpu, saved=saved) == torch.float16
    assert resolve_dtype("auto", gpu, saved=torch.float32) == torch.float16
    assert resolve_dtype("auto", gpu, saved=saved, overflows_float16=True) == torch.float32
    assert resolve_dtype("fp16", gpu, saved=saved) == torch.float16
    with pytest.raises(OptionError, match=r"bfloat16 cannot run on cuda:0: .* sm_75; use auto"):
        resolve_dtype("bf16", gpu, saved=saved)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert resolve_dtype("bf16", gpu, saved=saved) == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_words_are_scaled_as_transformers_rounds(dtype: torch.dtype, tmp_path: Path) -> None:
    """By the root of hidden_size in the table's dtype, and rows of the caller's are not."""
    model, layers = tiny_decoder("gemma3", "Model").to(dtype), []
    loaded = load(save(model, tmp_path), dtype)
    ids = random_ids([19])
    loaded.transformer.forward(loaded.pack(ids), on_layer=layers.append)
    assert torch.equal(layers[0], expected(model, ids[0]).hidden_states[0][0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_without_the_causal_mask(dtype: torch.dtype, tmp_path: Path) -> None:
    """As near float64 as transformers in this dtype; our norms round weight + 1."""
    model = tiny_decoder("gemma3", "Model", use_bidirectional_attention=True)
    loaded = load(save(model.to(dtype), tmp_path), dtype)
    ids = random_ids([33, 64, 5])
    theirs, exact = (
        torch.cat(
            [
                expected(type(model).from_pretrained(tmp_path, dtype=kind), own)
                .last_hidden_state[0]
                .double()
                for own in ids
            ]
        )
        for kind in (dtype, torch.float64)
    )
    ours = torch.cat(loaded.rows(ids)).double()
    noise = exact.abs() * torch.finfo(dtype).eps / 2  # which no arithmetic can beat
    their_error, our_error = theirs - exact, ours - exact
    assert our_error.square().mean() <= 4 * their_error.square().mean() + noise.square().mean()
    assert our_error.abs().max() <= 2 * their_error.abs().max() + noise.max()


def test_a_bidirectional_model_is_no_language_model(tmp_path: Path) -> None:
    folder = save(tiny_decoder("gemma3", use_bidirectional_attention=True), tmp_path)
    model = bytetx.load(folder, device="cpu")
    assert model.embed([[5, 6, 7]]).shape == (1, 48)
    with pytest.raises(InputError, match="sees its whole sequence"):
        model.generate([[5, 6]])


def test_every_choice_shows() -> None:
    """Errors would hide behind weights near zero: the smallest change of a choice must show."""
    ids = random_ids([40])[0]
    changes = (
        ("gemma2", {"attn_logit_softcapping": 3.2}),
        ("gemma2", {"final_logit_softcapping": 4.1}),
        ("gemma2", {"query_pre_attn_scalar": 21}),
        ("gemma2", {"sliding_window": WINDOW - 1}),
        ("gemma3", {"sliding_window": WINDOW - 1}),
        ("gemma3", {"layer_types": ["full_attention"] * 2 + ["sliding_attention"]}),
        ("gemma3", {"rope_parameters": None}),
        ("gemma3", {"rms_norm_eps": 2e-3}),
    )
    for name, change in changes:
        one, other = tiny_decoder(name), tiny_decoder(name, **change)
        difference = expected(one, ids).logits - expected(other, ids).logits
        assert difference.abs().max() > 10 * TOLERANCE, (name, change)
