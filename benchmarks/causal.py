"""Causal models of real shapes with random weights, as checkpoints, and loads of prompts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from benchmarks.gpu import Work
from benchmarks.rivals import quiet
from bytetx.checkpoint.spec import ModelSpec
from bytetx.nn.kv_cache import page_bytes

# (transformers' stem, what its config does not have by default)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "Qwen3",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "tie_word_embeddings": True,
        },
    ),
    # Four of 32 layers, and an eighth of the words: the head keeps its share.
    "llama-8b-4": (
        "Llama",
        {
            "vocab_size": 16032,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
        },
    ),
    "gpt2-124m": ("GPT2", {}),
    "smollm2-135m": (
        "Llama",
        {
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "max_position_embeddings": 8192,
            "rope_theta": 1e5,
            "tie_word_embeddings": True,
        },
    ),
}


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt's tokens, and how many tokens follow it."""

    prompt_tokens: int
    output_tokens: int


@contextmanager
def random_checkpoint(shape: str, dtype: torch.dtype) -> Iterator[Path]:
    """A folder with the shape's config and random weights; there is no tokenizer."""
    stem, own = SHAPES[shape]
    ending = "LMHeadModel" if stem == "GPT2" else "ForCausalLM"
    with TemporaryDirectory(prefix="bytetx-bench-") as folder:
        save_random_model(Path(folder), stem, ending, own, dtype=dtype)
        yield Path(folder)


def save_random_model(
    folder: Path, stem: str, ending: str, config: Mapping[str, Any], *, dtype: torch.dtype
) -> None:
    """Saves config and random weights, made on a GPU where there is one.

    stem, ending: of the names of transformers' classes, as Qwen3 and ForCausalLM.
    """
    import transformers

    torch.manual_seed(0)
    made_config = getattr(transformers, f"{stem}Config")(**config)
    with quiet(), torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = getattr(transformers, stem + ending)(made_config).to(dtype)
        model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def uniform_requests(count: int, prompt: tuple[int, int], output: tuple[int, int]) -> list[Request]:
    """Seeded; both ends of the ranges are in them."""
    rng = np.random.default_rng(0)
    draws = (rng.integers(low, high + 1, count).tolist() for low, high in (prompt, output))
    return [Request(*pair) for pair in zip(*draws, strict=True)]


def random_prompts(requests: Sequence[Request], *, vocab_size: int, seed: int) -> list[list[int]]:
    """Another seed shares no page with this one, so that no cache of prefixes makes it cheaper."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, r.prompt_tokens).tolist() for r in requests]


@torch.inference_mode()
def padded_generate(
    model: Any, prompts: Sequence[list[int]], num_tokens: int, **more: Any
) -> list[list[int]]:
    """transformers' greedy answers of num_tokens each, to one batch padded on the left.

    more: what model.generate takes beside them.
    """
    longest = max(map(len, prompts))
    device = model.device
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=device)
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False}
    answers = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **options, **more)
    given = answers.shape[1] - longest
    if given != num_tokens:
        raise RuntimeError(f"it gave {given} tokens of {num_tokens}")
    tokens: list[list[int]] = answers[:, longest:].tolist()
    return tokens


def prefill_work(
    spec: ModelSpec, requests: Sequence[Request], *, layers_speed: float = 1.0
) -> Work:
    """FLOP of the prompts' tokens: two a weight of the layers, and causal attention.

    layers_speed: how many times as fast as attention the layers' products may be; their FLOP count
    that much less.
    """
    tokens = sum(r.prompt_tokens for r in requests)
    pairs = sum(r.prompt_tokens * (r.prompt_tokens + 1) // 2 for r in requests)
    attention = 4.0 * spec.num_layers * spec.num_heads * spec.head_dim * pairs
    layers = 2.0 * spec.num_layers * _elements_of_layer(spec) * tokens
    return Work(0.0, layers / layers_speed + attention)


def decode_bytes(
    spec: ModelSpec, requests: Sequence[Request], dtype: torch.dtype, *, layer_bytes: int
) -> float:
    """Read by decode steps of all requests together: keys and values of each, weights once.

    dtype: of all but the layers' weights, which have layer_bytes each.
    """
    per_token = kv_bytes(spec, dtype)
    num_keys = sum(
        r.prompt_tokens * (r.output_tokens - 1) + r.output_tokens * (r.output_tokens - 1) // 2
        for r in requests
    )
    layers = spec.num_layers * _elements_of_layer(spec) * layer_bytes
    weights = layers + spec.vocab_size * spec.embedding_size * dtype.itemsize
    num_steps = max(r.output_tokens for r in requests) - 1
    return float(num_keys * per_token + num_steps * weights)


def kv_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers."""
    return page_bytes(
        num_layers=spec.num_layers,
        page_size=1,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
    )


def _elements_of_layer(spec: ModelSpec) -> int:
    attended = spec.num_heads * spec.head_dim
    qkv = attended + 2 * spec.num_kv_heads * spec.head_dim
    inner = (3 if spec.is_gated else 2) * spec.intermediate_size
    return spec.hidden_size * (qkv + attended + inner)
