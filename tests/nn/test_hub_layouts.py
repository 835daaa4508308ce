"""Checkpoints whose config.json is that of the hub's own code, which never runs."""

from pathlib import Path

import pytest
import torch
from checkpoints import edit_json
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


def write_config(folder: Path, config: dict[str, object]) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").write_text("{}")
    edit_json(folder / "config.json", **config)


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
    edit_json(tmp_path / "config.json", rotary_scaling_factor=None, num_experts=8)
    with pytest.raises(CheckpointError, match="num_experts is 8"):
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
