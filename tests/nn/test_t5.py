"""The encoders of T5 and mT5 against transformers, on small random checkpoints."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from tiny import load, one_thread, random_ids, randomize, save  # noqa: F401  (a fixture)

from bytetx.errors import CheckpointError
from bytetx.nn import heads
from bytetx.nn.loading import load_checkpoint
from bytetx.packed import split

TOLERANCE = 1e-4
SEQLENS = [1, 2, 17, 40]
SIZES = {"d_model": 48, "num_heads": 3, "d_kv": 8, "d_ff": 80, "num_layers": 2, "vocab_size": 60}


def tiny_t5(name: str = "T5EncoderModel", **config: object) -> torch.nn.Module:
    stem = "MT5" if name.startswith("MT5") else "T5"
    options = {"num_labels": 3, "use_cache": False} | SIZES | config
    model = getattr(transformers, name)(getattr(transformers, f"{stem}Config")(**options))
    randomize(model)
    return model.eval()


def expected(model: torch.nn.Module, ids: list[int]) -> object:
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), output_hidden_states=True)


@pytest.mark.parametrize("name", ["T5EncoderModel", "MT5EncoderModel"])
@pytest.mark.parametrize("activation", ["relu", "gated-gelu", "gated-silu", "gelu_new"])
def test_every_layer(name: str, activation: str, tmp_path: Path) -> None:
    model = tiny_t5(name, feed_forward_proj=activation)
    loaded = load(save(model, tmp_path))
    assert loaded.spec.is_gated == activation.startswith("gated")
    ids, layers = random_ids(SEQLENS), []
    batch = loaded.pack(ids)
    loaded.transformer.forward(batch, on_layer=layers.append)
    wanted = [expected(model, sequence).hidden_states for sequence in ids]
    for layer, x in enumerate(layers):
        for states, rows in zip(wanted, split(x, batch), strict=True):
            assert (rows - states[layer][0]).abs().max() < TOLERANCE
    assert loaded.weights.unused() == []


@pytest.mark.parametrize(("buckets", "distance"), [(32, 128), (8, 20), (40, 300)])
def test_buckets_of_the_config(buckets: int, distance: int, tmp_path: Path) -> None:
    """Distances up to and beyond the last bucket."""
    model = tiny_t5(
        relative_attention_num_buckets=buckets, relative_attention_max_distance=distance
    )
    loaded, ids = load(save(model, tmp_path)), random_ids([distance + 70, 3])
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert (rows - expected(model, sequence).last_hidden_state[0]).abs().max() < TOLERANCE


def test_token_classification(tmp_path: Path) -> None:
    model = tiny_t5("T5ForTokenClassification")
    loaded = load(save(model, tmp_path))
    head = heads.load_token_classification(loaded.spec, loaded.loader)
    ids = random_ids(SEQLENS)
    batch = loaded.pack(ids)
    logits = split(head.forward(loaded.transformer.forward(batch)), batch)
    for sequence, rows in zip(ids, logits, strict=True):
        assert (rows - expected(model, sequence).logits[0]).abs().max() < TOLERANCE


def test_a_checkpoint_of_both_halves(tmp_path: Path) -> None:
    """Its encoder is read where a folder of sentence-transformers declares what follows it."""
    model = tiny_t5("T5ForConditionalGeneration")
    folder = save(model, tmp_path)
    with pytest.raises(CheckpointError, match="T5ForConditionalGeneration, a head that bytetx"):
        load_checkpoint(folder, device="cpu", dtype="float32")
    names = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"path": path, "type": f"sentence_transformers.models.{name}"}
        for path, name in names.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text('{"pooling_mode_mean_tokens": true}')
    checkpoint = load_checkpoint(folder, device="cpu", dtype="float32")
    assert all(name.startswith("decoder.") for name in checkpoint.unused_tensors)
    loaded, ids = load(folder), random_ids(SEQLENS)
    with torch.no_grad():
        wanted = [model.encoder(torch.tensor([s])).last_hidden_state[0] for s in ids]
    for rows, states in zip(loaded.rows(ids), wanted, strict=True):
        assert (rows - states).abs().max() < TOLERANCE


def test_bf16_is_as_close_to_float64_as_transformers(tmp_path: Path) -> None:
    model = tiny_t5(feed_forward_proj="gated-gelu").bfloat16()
    loaded = load(save(model, tmp_path), torch.bfloat16)
    ids = random_ids([33, 64, 5])
    theirs = [expected(model, s).last_hidden_state[0].double() for s in ids]
    exact_model = model.double()
    exact = torch.cat([expected(exact_model, s).last_hidden_state[0] for s in ids])
    their_error, our_error = torch.cat(theirs) - exact, torch.cat(loaded.rows(ids)) - exact
    assert our_error.square().mean() <= 4 * their_error.square().mean()


def test_batch_mates_change_nothing(tmp_path: Path) -> None:
    loaded, ids = load(save(tiny_t5(), tmp_path)), random_ids([40, 1, 17, 30, 5])
    together, order = loaded.rows(ids), [3, 0, 4, 2, 1]
    for index, rows in zip(order, loaded.rows([ids[i] for i in order]), strict=True):
        assert torch.equal(rows, together[index])


def test_a_misspelt_feed_forward(tmp_path: Path) -> None:
    folder = save(tiny_t5(), tmp_path)
    config = (folder / "config.json").read_text().replace('"relu"', '"gated-relu"')
    (folder / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match="feed_forward_proj means 'relu'.* gate must be"):
        load(folder)
