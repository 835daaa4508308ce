"""Small random causal models of every family, as transformers builds them."""

from dataclasses import replace

import numpy as np
import torch
import transformers
from paged_steps import pack_past
from tiny import VOCAB_SIZE, Loaded, randomize
from torch import nn

from bytetx.nn.kv_cache import allocate_cache
from bytetx.nn.mixers import allocate_states
from bytetx.packed import split

# Sizes by the names most families have; the window lies between the lengths that tests use.
_LLAMA = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
}
_GPT = {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 96}
_OPT = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 80,
    "max_position_embeddings": 96,
}
_NEOX = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 96,
}
_NEO = {
    "hidden_size": 48,
    "num_layers": 3,
    "attention_types": [[["global", "local"], 1], [["local"], 1]],
    "num_heads": 4,
    "window_size": 8,
    "max_position_embeddings": 96,
}
WINDOW = 8


def _rope(rope_type: str, **parameters: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 500.0} | parameters}


_GROWTH = _rope(
    "yarn",
    factor=16.0,
    original_max_position_embeddings=6,
    mscale=1.0,
    mscale_all_dim=1.0,
    llama_4_scaling_beta=0.5,
)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 24}
_QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}

_PARTIAL = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
    }
}
_STARCODER = {key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"}
_STABLE = _STARCODER | {"rope_parameters": _PARTIAL["rope_parameters"]}

_MULTI_HEAD = {"num_key_value_heads": 4}
_GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 5.0,
}
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_FALCON = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_hidden_size": 80,
    "max_position_embeddings": 96,
}

_GEMMA = _LLAMA | {"head_dim": 16, "pad_token_id": 0}
_GEMMA2 = _GEMMA | {
    "sliding_window": WINDOW,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 4.0,
}
_GEMMA3 = _GEMMA | {
    "sliding_window": WINDOW,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 20,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    },
}
_LFM2 = {key: value for key, value in _LLAMA.items() if key != "rms_norm_eps"} | {
    "layer_types": ["conv", "full_attention", "conv"],
    "block_multiple_of": 24,
    "tie_word_embeddings": False,
}
_QWEN35 = _LLAMA | {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 192,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 500.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
    },
}
# An epsilon that keeps the norm of a result near 0 from making much of its last bits.
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 24, "rms_norm_eps": 1e-3}
_HYBRIDS = ("Qwen3_5Text", "Qwen3_5MoeText", "Qwen3Next")
_BLOOM = {"hidden_size": 48, "n_layer": 3, "n_head": 4}
_RW = {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}  # Falcon RW

# name: (stem of its class names, config)
DECODERS = {
    "llama": ("Llama", _LLAMA),
    "llama2": ("Llama", _LLAMA | {"num_key_value_heads": 4}),
    "llama-biases": ("Llama", _LLAMA | {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", _LLAMA | {"tie_word_embeddings": True}),
    "llama-wide-heads": ("Llama", _LLAMA | {"head_dim": 20}),
    "llama-linear": ("Llama", _LLAMA | _rope("linear", factor=2.0)),
    "llama-dynamic": ("Llama", _LLAMA | _rope("dynamic", factor=2.0)),
    "llama3": ("Llama", _LLAMA | _rope("llama3", factor=4.0, **_LLAMA3)),
    "llama-yarn": (
        "Llama",
        _LLAMA | _rope("yarn", factor=4.0, original_max_position_embeddings=24),
    ),
    "mistral": ("Mistral", _LLAMA | {"sliding_window": WINDOW}),
    "mistral-full": ("Mistral", _LLAMA | {"sliding_window": None}),
    "ministral3": ("Ministral3", _LLAMA | {"head_dim": 16, "sliding_window": None} | _GROWTH),
    "ministral3-window": (
        "Ministral3",
        _LLAMA | {"sliding_window": WINDOW, "head_dim": 16} | _GROWTH,
    ),
    "qwen2": ("Qwen2", _LLAMA),
    "qwen2-window": ("Qwen2", _LLAMA | _QWEN_WINDOW),
    "qwen3": ("Qwen3", _LLAMA | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-window": ("Qwen3", _LLAMA | {"head_dim": 16, "attention_bias": True} | _QWEN_WINDOW),
    "gpt2": ("GPT2", _GPT),
    "gpt2-scales": ("GPT2", _GPT | {"scale_attn_by_inverse_layer_idx": True, "n_inner": 72}),
    "gpt2-unscaled": ("GPT2", _GPT | {"scale_attn_weights": False}),
    "gpt_neox": ("GPTNeoX", _NEOX | {"rotary_pct": 0.5}),
    "gpt_neox-serial": ("GPTNeoX", _NEOX | {"use_parallel_residual": False}),
    "opt": ("OPT", _OPT),
    "opt-post": ("OPT", _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-no-biases": ("OPT", _OPT | {"enable_bias": False}),
    "gptj": ("GPTJ", _GPT | {"rotary_dim": 8}),
    "gpt_neo": ("GPTNeo", _NEO),
    "phi3": ("Phi3", _LLAMA | {"pad_token_id": 0}),
    "phi3-window": ("Phi3", _LLAMA | {"pad_token_id": 0, "sliding_window": WINDOW} | _PARTIAL),
    "starcoder2": ("Starcoder2", _STARCODER),
    "starcoder2-window": (
        "Starcoder2",
        _STARCODER | {"sliding_window": WINDOW, "use_bias": False},
    ),
    "stablelm": ("StableLm", _STABLE),
    "stablelm-biases": ("StableLm", _STABLE | {"use_qkv_bias": True, "num_key_value_heads": 4}),
    "olmo2": ("Olmo2", _LLAMA | {"pad_token_id": 0}),
    "olmo2-biases": ("Olmo2", _LLAMA | {"pad_token_id": 0, "attention_bias": True} | _MULTI_HEAD),
    "granite": ("Granite", _LLAMA | _GRANITE),
    "granite-tied": (
        "Granite",
        _LLAMA | _GRANITE | {"mlp_bias": True, "tie_word_embeddings": True},
    ),
    "gpt_bigcode": ("GPTBigCode", _GPT),
    "gpt_bigcode-heads": ("GPTBigCode", _GPT | {"multi_query": False, "n_inner": 72}),
    "falcon": ("Falcon", _FALCON),
    "falcon-heads": ("Falcon", _FALCON | {"multi_query": False, "bias": True}),
    "falcon-serial": ("Falcon", _FALCON | {"parallel_attn": False}),
    "falcon-groups": ("Falcon", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-one-norm": (
        "Falcon",
        _FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-alibi": ("Falcon", _FALCON | _RW),
    "falcon-alibi-groups": (
        "Falcon",
        _FALCON | {"alibi": True, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "bloom": ("Bloom", _BLOOM),
    "bloom-heads": ("Bloom", _BLOOM | {"n_head": 6}),
    "mixtral": ("Mixtral", _LLAMA | {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", _LLAMA | {"num_local_experts": 3, "sliding_window": WINDOW}),
    "qwen3_moe": ("Qwen3Moe", _LLAMA | _EXPERTS | {"mlp_only_layers": [1]}),
    "qwen3_moe-period": (
        "Qwen3Moe",
        _LLAMA | _EXPERTS | {"decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "smollm3": ("SmolLM3", _LLAMA | {"pad_token_id": 0, "no_rope_layer_interval": 2}),
    "gemma": ("Gemma", _GEMMA),
    "gemma2": ("Gemma2", _GEMMA2),
    "gemma2-full": (
        "Gemma2",
        _GEMMA2
        | {"layer_types": ["full_attention"] * 3, "tie_word_embeddings": False, "head_dim": 256},
    ),
    "gemma2-uncapped": (
        "Gemma2",
        _GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3Text", _GEMMA3),
    "gemma3-capped": (
        "Gemma3Text",
        _GEMMA3 | {"final_logit_softcapping": 4.0, "attention_bias": True},
    ),
    "lfm2": ("Lfm2", _LFM2),
    "lfm2-biases": (
        "Lfm2",
        _LFM2 | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False},
    ),
    "qwen3_5": ("Qwen3_5Text", _QWEN35),
    "qwen3_5_moe": ("Qwen3_5MoeText", _QWEN35 | _SHARED),
    "qwen3_next": ("Qwen3Next", _QWEN35 | _SHARED | {"mlp_only_layers": [1]}),
    "smollm3-layers": ("SmolLM3", _LLAMA | {"pad_token_id": 0, "no_rope_layers": [0, 1, 1]}),
}


def causal_class(name: str, head: str = "ForCausalLM") -> type:
    stem = DECODERS[name][0]
    if (stem, head) == ("Gemma3Text", "ForCausalLM"):
        stem = "Gemma3"
    if stem in _HYBRIDS and head == "ForCausalLM":
        stem = stem.removesuffix("Text")
    ending = "LMHeadModel" if (stem, head) == ("GPT2", "ForCausalLM") else head
    return getattr(transformers, stem + ending)


def tiny_decoder(name: str, head: str = "ForCausalLM", **config: object) -> nn.Module:
    """A transformers model in eval mode; weights spread so far that every part of it shows."""
    stem, own = DECODERS[name]
    settings = {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2} | own | config
    model = causal_class(name, head)(getattr(transformers, stem + "Config")(**settings))
    randomize(model)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "ln_" in parameter_name and parameter_name.endswith("weight"):
                parameter += 1.0  # a norm's scale, which randomize knows by "norm" alone
            if stem in _HYBRIDS and parameter_name.endswith("norm.weight"):
                parameter -= float("linear_attn" not in parameter_name)
            if stem.startswith("Gemma") and "norm" in parameter_name:
                parameter -= 1.0  # its norms add one to their weights
    return model.eval()


def expected(model: nn.Module, ids: list[int]) -> object:
    """transformers' output of one sequence alone, without padding or cache."""
    with torch.no_grad():
        return model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)


class CachedRun:
    """A model's forward passes over growing sequences, with the engine's part done by hand."""

    def __init__(self, loaded: Loaded, *, page_size: int):
        self.loaded, self.page_size = loaded, page_size
        self.done: list[int] = []
        self.cache = None

    def step(self, ids: list[list[int]], counts: list[int]) -> list[torch.Tensor]:
        """The rows of each sequence's next counts[i] tokens."""
        spec, size = self.loaded.spec, self.page_size
        self.done = self.done or [0] * len(ids)
        pages_each = -(-spec.max_positions // size)
        if self.cache is None:
            self.cache = allocate_cache(
                num_layers=spec.num_attention_layers,
                num_pages=pages_each * len(ids),
                page_size=size,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                dtype=self.loaded.transformer.embeddings.word.dtype,
            )
            for layer in self.cache.layers:
                layer.k_cache.fill_(torch.nan)
                layer.v_cache.fill_(torch.nan)
            # Sequences have their slots in another order, and one slot is nobody's.
            dtype = self.loaded.transformer.embeddings.word.dtype
            states = allocate_states(spec, len(ids) + 1, dtype=dtype, device=torch.device("cpu"))
            for state in states:
                state.conv.fill_(torch.nan)
                if state.memory is not None:
                    state.memory.fill_(torch.nan)
            self.cache = replace(self.cache, states=states)
        # Sequences take their pages in turn, last page first: no two neighbours in memory.
        pages = [[len(ids) * p + i for p in reversed(range(pages_each))] for i in range(len(ids))]
        pieces = [own[d : d + n] for own, d, n in zip(ids, self.done, counts, strict=True)]
        starts = np.array(self.done, dtype=np.int32)
        self.done = [d + len(piece) for d, piece in zip(self.done, pieces, strict=True)]
        seqlens = np.array([len(piece) for piece in pieces], dtype=np.int32)
        past = pack_past(pages, np.array(self.done, np.int32), seqlens, page_size=size)
        slots = torch.arange(len(ids) - 1, -1, -1, dtype=torch.int32)
        past = replace(past, state_slots=slots if self.cache.states else None)
        batch = self.loaded.pack(pieces)
        moved = batch.position_ids + torch.from_numpy(np.repeat(starts, seqlens))
        batch = replace(batch, position_ids=moved, past=past)
        return split(self.loaded.transformer.forward(batch, cache=self.cache), batch)
