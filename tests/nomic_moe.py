"""A small random checkpoint of NomicBERT v2 in the hub's layout."""

from pathlib import Path

import torch
from checkpoints import write_config
from safetensors.torch import save_file
from tiny import VOCAB_SIZE

NOMIC_MOE = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "auto_map": {
        "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
        "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
    },
    "activation_function": "gelu",
    "causal": False,
    "expert_choice_router": False,
    "ffn_div": 1,
    "layer_norm_epsilon": 1e-5,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_every_n_layers": 2,
    "moe_impl": "megablocks",
    "moe_normalize_expert_weights": False,
    "moe_top_k": 2,
    "n_embd": 48,
    "n_head": 3,
    "n_inner": 80,
    "n_layer": 4,
    "n_positions": 2048,
    "num_experts": 4,
    "num_shared_experts": 0,
    "pad_token_id": 1,
    "prenorm": False,
    "qkv_proj_bias": True,
    "rotary_emb_base": 10000.0,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 1,
    "use_rms_norm": False,
    "vocab_size": VOCAB_SIZE,
}


def save_nomic_moe(folder: Path, *, prefix: str = "", **changes: object) -> dict[str, torch.Tensor]:
    """Writes config.json and model.safetensors; returns the tensors by their names without prefix.

    changes: of config.json; the tensors are those of NOMIC_MOE.
    """
    hidden, inner = NOMIC_MOE["n_embd"], NOMIC_MOE["n_inner"]
    experts = NOMIC_MOE["num_experts"]
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (VOCAB_SIZE, hidden),
        "embeddings.token_type_embeddings.weight": (1, hidden),
        **_norm("emb_ln", hidden),
    }
    for i in range(NOMIC_MOE["n_layer"]):
        layer = f"encoder.layers.{i}"
        shapes |= _linear(f"{layer}.attn.Wqkv", 3 * hidden, hidden)
        shapes |= _linear(f"{layer}.attn.out_proj", hidden, hidden)
        shapes |= _norm(f"{layer}.norm1", hidden) | _norm(f"{layer}.norm2", hidden)
        if i % 2 == 0:
            shapes |= _linear(f"{layer}.mlp.fc1", inner, hidden)
            shapes |= _linear(f"{layer}.mlp.fc2", hidden, inner)
            continue
        shapes[f"{layer}.mlp.router.layer.weight"] = (experts, hidden)
        shapes[f"{layer}.mlp.experts.mlp.w1"] = (experts * inner, hidden)
        shapes[f"{layer}.mlp.experts.mlp.w2"] = (experts * inner, hidden)
        shapes[f"{layer}.mlp.experts.bias"] = (hidden,)
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in shapes.items():
        is_scale = name.endswith(".weight") and len(shape) == 1
        tensors[name] = torch.randn(shape, generator=generator) * 0.2 + is_scale
    folder.mkdir(parents=True, exist_ok=True)
    saved = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    write_config(folder, NOMIC_MOE | changes)
    return tensors


def _linear(stem: str, n: int, k: int) -> dict[str, tuple[int, ...]]:
    return {f"{stem}.weight": (n, k), f"{stem}.bias": (n,)}


def _norm(stem: str, size: int) -> dict[str, tuple[int, ...]]:
    return {f"{stem}.weight": (size,), f"{stem}.bias": (size,)}
