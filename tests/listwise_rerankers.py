"""Small random checkpoints of listwise rerankers, in the layout of the hub."""

from pathlib import Path

import torch
from checkpoints import make_tokenizer, write_config
from safetensors.torch import load_file, save_file
from tiny_decoders import tiny_decoder

MARKS = ["<|embed_token|>", "<|rerank_token|>"]
POSITIONS = 12288


def save_reranker(folder: Path, version: str) -> Path:
    """A random checkpoint in the layout of jinaai/jina-reranker-v3 and -v3.5."""
    tokenizer = make_tokenizer("bpe", max_tokens=POSITIONS)
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.backend_tokenizer.post_processor = None
    windows = {}
    if version == "v3.5":
        kinds = ["sliding_attention", "sliding_attention", "full_attention"]
        windows = {"layer_types": kinds, "sliding_window": 64, "use_sliding_window": True}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": POSITIONS}
    model = tiny_decoder("qwen3", "Model", **sizes, **windows)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    hidden, generator = model.config.hidden_size, torch.Generator().manual_seed(3)
    saved = {f"model.{name.removeprefix('model.')}": tensor for name, tensor in tensors.items()}
    saved["projector.0.weight"] = torch.randn(hidden // 2, hidden, generator=generator) * 0.2
    saved["projector.2.weight"] = torch.randn(512, hidden // 2, generator=generator) * 0.2
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    given = model.config.to_dict()
    code = {"AutoModel": "modeling.JinaForRanking"}
    write_config(folder, given | {"architectures": ["JinaForRanking"], "auto_map": code})
    return folder
