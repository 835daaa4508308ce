"""Encoders with ALiBi (Jina embeddings v2) against float64, written from the definition."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import Loaded, load, one_thread, random_ids  # noqa: F401  (a fixture)
from torch import Tensor
from torch.nn.functional import gelu, layer_norm

import bytetx
from bytetx.checkpoint.spec import build_spec
from bytetx.errors import CheckpointError
from bytetx.nn import heads
from bytetx.nn.alibi import alibi_slopes

SEQLENS = [1, 2, 17, 40, 131]
HIDDEN, INNER, NUM_LAYERS = 48, 80, 2
CODE = "jinaai/jina-bert-implementation--"
CONFIG = {
    "_name_or_path": "jinaai/jina-bert-implementation",
    "model_max_length": 8192,
    "architectures": ["JinaBertForMaskedLM"],
    "auto_map": {
        "AutoConfig": f"{CODE}configuration_bert.JinaBertConfig",
        "AutoModel": f"{CODE}modeling_bert.JinaBertModel",
        "AutoModelForMaskedLM": f"{CODE}modeling_bert.JinaBertForMaskedLM",
        "AutoModelForSequenceClassification": (
            f"{CODE}modeling_bert.JinaBertForSequenceClassification"
        ),
    },
    "hidden_act": "gelu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 8192,
    "model_type": "bert",
    "num_attention_heads": 12,
    "num_hidden_layers": NUM_LAYERS,
    "pad_token_id": 0,
    "position_embedding_type": "alibi",
    "type_vocab_size": 2,
    "vocab_size": 60,
    "feed_forward_type": "geglu",
    "emb_pooler": "mean",
    "attn_implementation": "torch",
}


def tensors_of(*, with_heads: bool = False) -> dict[str, Tensor]:
    """Random tensors under the names of the published files."""
    linears = {"pooler.dense": (HIDDEN, HIDDEN)}
    norms = ["embeddings.LayerNorm"]
    shapes = {
        "embeddings.word_embeddings.weight": (60, HIDDEN),
        "embeddings.token_type_embeddings.weight": (2, HIDDEN),
    }
    for i in range(NUM_LAYERS):
        layer = f"encoder.layer.{i}"
        for part in ("self.query", "self.key", "self.value", "output.dense"):
            linears[f"{layer}.attention.{part}"] = (HIDDEN, HIDDEN)
        linears[f"{layer}.mlp.wo"] = (HIDDEN, INNER)
        shapes[f"{layer}.mlp.gated_layers.weight"] = (2 * INNER, HIDDEN)
        norms += [f"{layer}.attention.output.LayerNorm", f"{layer}.mlp.layernorm"]
    prefix = ""
    if with_heads:
        prefix, shapes = "bert.", {f"bert.{name}": shape for name, shape in shapes.items()}
        linears = {f"bert.{name}": shape for name, shape in linears.items()}
        linears["classifier"] = (1, HIDDEN)
    for name, shape in linears.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{prefix}{name}.{part}": (HIDDEN,) for part in ("weight", "bias")}
    generator = torch.Generator().manual_seed(5)
    scales = {f"{prefix}{name}.weight" for name in norms}
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if name in scales else 0.0)
        for name, shape in shapes.items()
    }


def write(folder: Path, tensors: dict[str, Tensor], **config: object) -> Path:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    return folder


def published_slopes(num_heads: int) -> list[float]:
    """As the paper's appendix states them: by recursion, in float64."""

    def of_power(n: int) -> list[float]:
        start = 2.0 ** (-(2.0 ** -(math.log2(n) - 3)))
        return [start ** (i + 1) for i in range(n)]

    power = 2 ** math.floor(math.log2(num_heads))
    return of_power(power) + of_power(2 * power)[0::2][: num_heads - power]


def expected(tensors: dict[str, Tensor], ids: list[int], num_heads: int) -> Tensor:
    """Last hidden states [len, hidden_size] of one sequence, f64."""
    t = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ t[f"{name}.weight"].T + t[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        weight, bias = t[f"{name}.weight"], t[f"{name}.bias"]
        return layer_norm(x, (HIDDEN,), weight, bias, 1e-12)

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(1, (num_heads, -1)).transpose(0, 1)

    slopes = torch.tensor(published_slopes(num_heads), dtype=torch.float64)
    places = torch.arange(len(ids))
    bias = -slopes[:, None, None] * (places[:, None] - places).abs()
    words = t["embeddings.word_embeddings.weight"][ids]
    x = norm(words + t["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(NUM_LAYERS):
        own = f"encoder.layer.{i}"
        attention = f"{own}.attention"
        q, k, v = (
            by_head(linear(x, f"{attention}.self.{part}")) for part in ("query", "key", "value")
        )
        scores = q @ k.transpose(1, 2) / math.sqrt(HIDDEN // num_heads) + bias
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        x = norm(linear(attended, f"{attention}.output.dense") + x, f"{attention}.output.LayerNorm")
        both = x @ t[f"{own}.mlp.gated_layers.weight"].T
        inner = gelu(both[:, :INNER]) * both[:, INNER:]
        x = norm(linear(inner, f"{own}.mlp.wo") + x, f"{own}.mlp.layernorm")
    return x


def assert_states(loaded: Loaded, tensors: dict[str, Tensor], num_heads: int) -> None:
    ids = random_ids(SEQLENS)
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert (rows - expected(tensors, sequence, num_heads)).abs().max() < 1e-4


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12])
def test_slopes_of_any_number_of_heads(num_heads: int) -> None:
    wanted = torch.tensor(published_slopes(num_heads))
    torch.testing.assert_close(alibi_slopes(num_heads, "cpu"), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_heads", [3, 8, 12])
def test_hidden_states(num_heads: int, tmp_path: Path) -> None:
    tensors = tensors_of()
    loaded = load(write(tmp_path, tensors, num_attention_heads=num_heads))
    assert loaded.spec.family == "jina_bert"
    assert_states(loaded, tensors, num_heads)
    assert sorted(loaded.weights.unused()) == ["pooler.dense.bias", "pooler.dense.weight"]


def test_batch_mates_change_nothing(tmp_path: Path) -> None:
    loaded = load(write(tmp_path, tensors_of()))
    ids = random_ids(SEQLENS)
    rows = loaded.rows(ids)
    for i, moved in zip(reversed(range(len(ids))), loaded.rows(ids[::-1]), strict=True):
        assert torch.equal(moved, rows[i])
    for sequence, own in zip(ids, rows, strict=True):
        assert torch.equal(loaded.rows([sequence])[0], own)


def test_the_head_of_a_reranker(tmp_path: Path) -> None:
    tensors = tensors_of(with_heads=True)
    labels = {"architectures": ["JinaBertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    loaded = load(write(tmp_path, tensors, **labels))
    head = heads.load_sequence_classification(loaded.spec, loaded.loader)
    ids = random_ids([9, 30])
    plain = {name.removeprefix("bert."): tensor for name, tensor in tensors.items()}
    batch = loaded.pack(ids)
    logits = head.forward(heads.first_tokens(loaded.transformer.forward(batch), batch))
    for sequence, got in zip(ids, logits, strict=True):
        first = expected(plain, sequence, 12)[0]
        pooled = (
            first @ plain["pooler.dense.weight"].double().T + plain["pooler.dense.bias"]
        ).tanh()
        wanted = pooled @ plain["classifier.weight"].double().T + plain["classifier.bias"]
        assert (got - wanted).abs().max() < 1e-4


def test_embeddings_are_the_mean_of_all_tokens(tmp_path: Path) -> None:
    """As the published modules.json says."""
    tensors = tensors_of()
    write(tmp_path, tensors)
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    kinds = [
        ("", "sentence_transformers.models.Transformer"),
        ("1_Pooling", "sentence_transformers.models.Pooling"),
    ]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(kinds)
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    ids = random_ids([5, 61])
    vectors = bytetx.load(tmp_path, device="cpu", dtype="float32").embed(ids)
    for sequence, vector in zip(ids, vectors, strict=True):
        wanted = expected(tensors, sequence, 12).mean(0)
        assert (torch.as_tensor(vector) - wanted).abs().max() < 1e-4


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="position_embedding_type 'absolute' is not supp"):
        build_spec(CONFIG | {"position_embedding_type": "absolute"})
    with pytest.raises(CheckpointError, match="feed_forward_type 'reglu' is not supported"):
        build_spec(CONFIG | {"feed_forward_type": "reglu"})
    with pytest.raises(CheckpointError, match="must be at most 1048576 with ALiBi, got 2000000"):
        build_spec(CONFIG | {"max_position_embeddings": 2_000_000})
    tensors = tensors_of()
    names = {name: name.replace("gated_layers", "up_gated_layer") for name in tensors}
    write(tmp_path, {names[name]: tensor for name, tensor in tensors.items()})
    with pytest.raises(CheckpointError, match=r"encoder.layer.0.mlp.gated_layers.weight"):
        load(tmp_path)
