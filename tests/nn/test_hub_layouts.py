"""Checkpoints whose config.json is that of the hub's own code, which never runs."""

from pathlib import Path

import pytest
import torch
from checkpoints import edit_json, write_config
from nomic_moe import NOMIC_MOE, save_nomic_moe
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, load, one_thread, random_ids, save, tiny_model  # noqa: F401  (a fixture)
from torch import nn

from bytetx.errors import CheckpointError

SEQLENS = [1, 2, 17, 40]
NOMIC = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    },
    "activation_function": "swiglu",
    "causal": False,
    "n_embd": 48,
    "n_head": 3,
    "n_inner": 80,
    "n_layer": 2,
    "n_positions": 8192,
    "layer_norm_epsilon": 1e-12,
    "prenorm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 60,
}
GTE = {
    "model_type": "new",
    "architectures": ["NewModel"],
    "auto_map": {"AutoConfig": "configuration.NewConfig", "AutoModel": "modeling.NewModel"},
    "hidden_act": "gelu",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_theta": 500000,
    "type_vocab_size": 0,
    "vocab_size": 60,
}


def needs(family: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(family not in FAMILIES, reason="transformers is too old")


def states(model: nn.Module, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0]


def assert_same(model: nn.Module, folder: Path) -> None:
    loaded, ids = load(folder), random_ids(SEQLENS)
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert (rows - states(model, sequence)).abs().max() < 1e-4
    assert loaded.weights.unused() == []


@needs("nomic_bert")
def test_nomic_bert(tmp_path: Path) -> None:
    model = tiny_model("nomic_bert")
    write_config(save(model, tmp_path), NOMIC)
    assert_same(model, tmp_path)
    edit_json(tmp_path / "config.json", rotary_scaling_factor=2)
    with pytest.raises(CheckpointError, match="rotary_scaling_factor is 2, which bytetx does not"):
        load(tmp_path)


@needs("gte")
@pytest.mark.parametrize("factor", [None, 2.0, 8.0])
@pytest.mark.parametrize("prefix", ["", "new."])
def test_gte(factor: float | None, prefix: str, tmp_path: Path) -> None:
    model = tiny_model("gte", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    model.embeddings.token_type_embeddings.weight.data.zero_()
    save(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"{prefix}{name}": tensor for name, tensor in load_file(file).items()}
    del tensors[f"{prefix}embeddings.token_type_embeddings.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    scaling = None if factor is None else {"type": "ntk", "factor": factor}
    write_config(tmp_path, GTE | {"rope_scaling": scaling})
    if factor is not None:
        # Written out from the hub's code: a larger base, and all frequencies slower.
        features = torch.arange(0, 16, 2).double() / 16
        own = 1 / (5e5 * factor) ** features / factor ** (2 / 16)
        model.rotary_emb.inv_freq.copy_(own)
    assert_same(model, tmp_path)


@needs("nomic_bert")
def test_other_code_is_refused(tmp_path: Path) -> None:
    save(tiny_model("nomic_bert"), tmp_path)
    auto_map = {"AutoModel": "somebody/else--modeling_other.NomicBertModel"}
    write_config(tmp_path, NOMIC | {"auto_map": auto_map})
    with pytest.raises(CheckpointError, match="never runs such code"):
        load(tmp_path)
    write_config(tmp_path, GTE | {"layer_norm_type": "rms_norm"})
    with pytest.raises(CheckpointError, match="layer_norm_type 'rms_norm' is not supported"):
        load(tmp_path)


class NomicExperts(nn.Module):
    """A layer of NomicBERT v2 as the hub's code computes it, written out row by row."""

    def __init__(self, tensors: dict[str, torch.Tensor], stem: str, *, normalizes: bool):
        super().__init__()
        self.tensors, self.stem, self.normalizes = tensors, stem, normalizes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        router, w1, w2, bias = (
            self.tensors[f"{self.stem}.{name}"]
            for name in ("router.layer.weight", "experts.mlp.w1", "experts.mlp.w2", "experts.bias")
        )
        w1, w2 = (w.unflatten(0, (router.shape[0], -1)) for w in (w1, w2))
        out = torch.zeros_like(x)
        for i, row in enumerate(x):
            weights, chosen = (router @ row).softmax(0).topk(2)
            weights = weights / weights.sum() if self.normalizes else weights
            for weight, e in zip(weights, chosen, strict=True):
                out[i] += weight * (nn.functional.gelu(w1[e] @ row) @ w2[e])
        return out + bias


def nomic_moe_states(
    tensors: dict[str, torch.Tensor], ids: list[int], *, normalizes: bool
) -> torch.Tensor:
    """Last hidden states of a checkpoint of save_nomic_moe, in plain torch."""

    def linear(x: torch.Tensor, stem: str) -> torch.Tensor:
        return nn.functional.linear(x, tensors[f"{stem}.weight"], tensors[f"{stem}.bias"])

    def norm(x: torch.Tensor, stem: str) -> torch.Tensor:
        own = tensors[f"{stem}.weight"], tensors[f"{stem}.bias"]
        return nn.functional.layer_norm(x, x.shape[1:], *own, eps=1e-5)

    words = tensors["embeddings.word_embeddings.weight"][ids]
    x = norm(words + tensors["embeddings.token_type_embeddings.weight"][0], "emb_ln")
    angles = torch.arange(len(ids))[:, None] / 10000 ** (torch.arange(0, 16, 2) / 16)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    for i in range(NOMIC_MOE["n_layer"]):
        layer = f"encoder.layers.{i}"
        q, k, v = linear(x, f"{layer}.attn.Wqkv").view(-1, 3, 3, 16).unbind(1)
        q, k = (
            torch.cat(
                [h[..., :8] * cos - h[..., 8:] * sin, h[..., 8:] * cos + h[..., :8] * sin], -1
            )
            for h in (q, k)
        )
        scores = torch.einsum("qhd,khd->hqk", q, k) / 4
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = norm(x + linear(attended, f"{layer}.attn.out_proj"), f"{layer}.norm1")
        if i % 2:
            mixed = NomicExperts(tensors, f"{layer}.mlp", normalizes=normalizes)(x)
        else:
            mixed = linear(nn.functional.gelu(linear(x, f"{layer}.mlp.fc1")), f"{layer}.mlp.fc2")
        x = norm(x + mixed, f"{layer}.norm2")
    return x


@pytest.mark.parametrize("prefix", ["", "bert."])
@pytest.mark.parametrize("normalizes", [False, True])
def test_nomic_bert_v2(prefix: str, normalizes: bool, tmp_path: Path) -> None:
    tensors = save_nomic_moe(tmp_path, prefix=prefix, moe_normalize_expert_weights=normalizes)
    loaded, ids = load(tmp_path), random_ids(SEQLENS)
    assert loaded.spec.family == "nomic_bert_moe"
    for sequence, rows in zip(ids, loaded.rows(ids), strict=True):
        assert (
            rows - nomic_moe_states(tensors, sequence, normalizes=normalizes)
        ).abs().max() < 1e-4
        assert torch.equal(rows, loaded.rows([sequence])[0])
    assert loaded.weights.unused() == []
    assert not loaded.transformer.is_capturable


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_shared_experts": 1}, "num_shared_experts is 1, which bytetx does not run"),
        ({"moe_every_n_layers": 3}, "moe_every_n_layers 3 is not supported; only 2 is"),
        ({"moe_top_k": 5}, "moe_top_k 5 is more than the 4 experts"),
        ({"n_inner": 96}, "has shape .* config.json implies"),
    ],
)
def test_other_experts_of_nomic_bert(
    changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    save_nomic_moe(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)
