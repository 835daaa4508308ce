"""OpenAI's privacy filter against transformers: sinks, clamped experts with biases, windows."""

import json
from pathlib import Path

import pytest
import torch
from privacy_filters import ROPE, privacy_filter, save_privacy_filter
from tiny import load, one_thread, random_ids, save  # noqa: F401  (one_thread is a fixture)
from torch import nn

import bytetx
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import CheckpointError
from bytetx.nn import heads
from bytetx.packed import split

SEQLENS = [1, 2, 5, 6, 17, 40, 100]  # a row sees 5 tokens before and behind it


def stock(model: nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def logits(folder: Path, ids: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    loaded = load(folder, dtype)
    head = heads.load_token_classification(loaded.spec, loaded.loader)
    batch = loaded.pack(ids)
    found = split(head.forward(loaded.transformer.forward(batch)), batch)
    assert loaded.weights.unused() == []
    return found


@pytest.mark.feature("Checkpoints", "OpenAI's privacy filter")
@pytest.mark.parametrize("prefix_of_rope", ["rope_parameters", "rope_scaling"])
def test_every_layer_and_the_head(prefix_of_rope: str, tmp_path: Path) -> None:
    model = save_privacy_filter(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config[prefix_of_rope] = config.pop("rope_parameters")
    path.write_text(json.dumps(config))
    ids, layers = random_ids(SEQLENS), []
    loaded = load(tmp_path)
    batch = loaded.pack(ids)
    loaded.transformer.forward(batch, on_layer=layers.append)
    with torch.no_grad():
        wanted = [model.model(torch.tensor([one]), output_hidden_states=True) for one in ids]
    assert len(layers) == len(wanted[0].hidden_states) == 3
    for i, x in enumerate(layers):
        for rows, output in zip(split(x, batch), wanted, strict=True):
            assert (rows - output.hidden_states[i][0]).abs().max() < 1e-4
    for sequence, rows in zip(ids, logits(tmp_path, ids, torch.float32), strict=True):
        assert (rows - stock(model, sequence)).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype, tmp_path: Path) -> None:
    """Against the f32 model, as close as transformers' own in the dtype, whose experts multiply in
    f32: of all rows but those whose rounding takes another expert."""
    model, ids = save_privacy_filter(tmp_path), random_ids([1, 2, 17, 40])
    theirs = type(model).from_pretrained(tmp_path, dtype=dtype)
    errors: list[torch.Tensor] = []
    for sequence, rows in zip(ids, logits(tmp_path, ids, dtype), strict=True):
        exact = stock(model, sequence)
        found = (rows.float() - exact, stock(theirs, sequence).float() - exact)
        errors.append(torch.stack([one.square().mean(1).sqrt() for one in found]))
    ours, plain = torch.cat(errors, dim=1).median(dim=1).values
    assert ours <= 2 * plain


def test_batch_mates_change_nothing(tmp_path: Path) -> None:
    save_privacy_filter(tmp_path)
    ids = random_ids(SEQLENS)
    loaded = load(tmp_path)
    together = loaded.rows(ids)
    for sequence, rows in zip(ids, together, strict=True):
        assert torch.equal(loaded.rows([sequence])[0], rows)
    for one, rows in zip(reversed(ids), loaded.rows(ids[::-1]), strict=True):
        assert torch.equal(together[ids.index(one)], rows)


def test_the_numbers_of_its_config_are_read(tmp_path: Path) -> None:
    """Each one changes the result as it changes transformers'."""
    changes: list[dict[str, object]] = [
        {"swiglu_limit": 0.3},
        {"swiglu_alpha": 0.5},
        {"sliding_window": 1},
        {"num_experts_per_tok": 1},
        {"attention_bias": False},
        {"rope_parameters": ROPE | {"truncate": True, "rope_theta": 100.0}},
    ]
    ids = random_ids([30])
    base = logits(save(privacy_filter(), tmp_path / "base"), ids, torch.float32)[0]
    for i, change in enumerate(changes):
        model = privacy_filter(**change)
        found = logits(save(model, tmp_path / str(i)), ids, torch.float32)[0]
        assert (found - stock(model, ids[0])).abs().max() < 1e-4
        assert (found - base).abs().max() > 1e-3


def test_what_its_class_takes_where_the_config_says_nothing() -> None:
    """The rotary positions, and with them the longest text, of the published checkpoint."""
    spec = build_spec({"model_type": "openai_privacy_filter"})
    rotary = spec.layer_spec.rotary
    assert rotary is not None and spec.experts is not None
    assert (rotary.scaling, rotary.factor, rotary.theta) == ("yarn", 32.0, 150000.0)
    assert (rotary.truncate, rotary.is_interleaved, spec.max_positions) == (False, True, 131072)
    assert (spec.layer_spec.window_of(0), spec.layer_spec.window_of(7)) == (129, 129)
    assert (spec.experts.num_experts, spec.experts.top_k, spec.experts.size) == (128, 4, 640)
    assert (spec.experts.gate_limit, spec.experts.gate_alpha) == (7.0, 1.702)
    given = {"model_type": "openai_privacy_filter", "rope_theta": 10.0}
    older = build_spec(given).layer_spec.rotary
    assert older is not None and (older.scaling, older.theta) == ("default", 10.0)
    with pytest.raises(CheckpointError, match="swiglu_limit"):
        build_spec({"model_type": "openai_privacy_filter", "swiglu_limit": 0})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrap(dtype: torch.dtype, tmp_path: Path) -> None:
    """Padded batches; experts are laid out anew once, and state_dict gives the stock layout."""
    save_privacy_filter(tmp_path)
    kind = type(privacy_filter())
    plain, wrapped = (kind.from_pretrained(tmp_path, dtype=dtype) for _ in range(2))
    bytetx.wrap(wrapped)
    assert wrapped.model.forward.current_plan().reason is None
    ids = torch.tensor(random_ids([20, 20]))
    mask = torch.ones_like(ids)
    mask[1, 9:] = 0
    with torch.no_grad():
        wanted, found = (m(ids, attention_mask=mask).logits.float() for m in (plain, wrapped))
    errors = (found - wanted)[mask.bool()].abs().amax(1)
    assert errors.median() < (1e-5 if dtype == torch.float32 else 0.1)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    before = plain.state_dict()[name]
    assert torch.equal(wrapped.state_dict()[name], before)
    with torch.no_grad():
        wrapped.get_parameter(name).zero_()
        plain.get_parameter(name).zero_()
        changed, right = (m(ids, attention_mask=mask).logits.float() for m in (wrapped, plain))
    errors = (changed - right)[mask.bool()].abs().amax(1)
    assert errors.median() < (1e-5 if dtype == torch.float32 else 0.1)
    bytetx.unwrap(wrapped)
    assert wrapped.get_parameter(name).is_contiguous()
