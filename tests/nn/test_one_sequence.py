"""Which models' layers the kernel for one sequence computes."""

from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from checkpoints import save_causal
from tiny import load
from tiny_decoders import DECODERS

from bytetx.checkpoint.layer_spec import LayerSpec
from bytetx.nn.cpu_steps import CpuSteps
from bytetx.nn.kv_cache import KvCache, allocate_cache
from bytetx.nn.one_sequence import OneSequence, step_weights
from bytetx.nn.transformer import Transformer

# Pre-norm layers with RMS norms and a SiLU gate, without biases, windows, experts or multipliers.
PLAIN = {
    *("llama", "llama2", "llama-tied", "llama-wide-heads", "llama-linear", "llama3", "llama-yarn"),
    *("mistral-full", "qwen2", "qwen3", "phi3"),
}


def cache_of(transformer: Transformer, *, has_codes: bool = False) -> KvCache:
    spec = transformer.spec
    return allocate_cache(
        num_layers=spec.num_layers,
        num_pages=2,
        page_size=16,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=torch.float32,
        has_codes=has_codes,
    )


@pytest.mark.parametrize("name", DECODERS)
def test_layers_that_do_more_run_as_before(tmp_path: Path, name: str) -> None:
    inner = {"ffn_dim": 96} if name.startswith("opt") else {"intermediate_size": 96}
    if DECODERS[name][0] in ("GPT2", "GPTJ", "GPTNeo", "GPTBigCode", "Falcon", "Bloom"):
        inner = {}
    transformer = load(save_causal(tmp_path, name, **inner), prepack=False).transformer
    weights = step_weights(transformer, cache_of(transformer))
    assert (weights is not None) == (name in PLAIN)
    if weights is None:
        return
    spec = transformer.spec
    assert weights.hidden_size == spec.hidden_size and weights.num_kv_heads == spec.num_kv_heads
    assert (weights.layers[0].q_norm is None) == (name != "qwen3")
    # There is no such kernel on a CPU.
    assert weights.workspace_bytes == 0
    assert OneSequence.of(transformer, cache_of(transformer)) is None


def test_gates_that_are_not_in_blocks_of_32_run_as_before(tmp_path: Path) -> None:
    transformer = load(save_causal(tmp_path, "qwen3"), prepack=False).transformer
    assert step_weights(transformer, cache_of(transformer)) is None


def test_batch_invariant_layers_run_as_before(tmp_path: Path) -> None:
    folder = save_causal(tmp_path, "qwen3", intermediate_size=96)
    transformer = load(folder, prepack=False).transformer
    transformer.layers.batch_invariant = True
    assert step_weights(transformer, cache_of(transformer)) is None


def test_pages_of_codes_run_as_before(tmp_path: Path) -> None:
    """The kernels of whole layers, of one GPU and of a CPU, would read codes as numbers."""
    folder = save_causal(tmp_path, "qwen3", intermediate_size=96)
    transformer = load(folder, prepack=False).transformer
    assert step_weights(transformer, cache_of(transformer)) is not None
    assert step_weights(transformer, cache_of(transformer, has_codes=True)) is None
    packed = load(folder).transformer
    assert CpuSteps.of(packed, cache_of(packed, has_codes=True)) is None


@dataclass(frozen=True, slots=True)
class LaterSpec(LayerSpec):
    """Layers with a choice that no kernel of whole layers knows."""

    novelty: int = 0


def test_a_choice_of_layers_that_is_added_later_is_refused(tmp_path: Path) -> None:
    """By the kernels of one GPU and of a CPU, until they name it."""
    folder = save_causal(tmp_path, "qwen3", intermediate_size=96)
    plain, panels = (load(folder, prepack=prepack).transformer for prepack in (False, True))
    had_steps = CpuSteps.of(panels, cache_of(panels)) is not None
    for novelty in (0, 1):
        for transformer in (plain, panels):
            own = transformer.spec.layer_spec
            values = {field.name: getattr(own, field.name) for field in fields(LayerSpec)}
            transformer.layers.layer_spec = LaterSpec(**values, novelty=novelty)
        assert (step_weights(plain, cache_of(plain)) is None) == bool(novelty)
        has_steps = CpuSteps.of(panels, cache_of(panels)) is not None
        assert has_steps == (had_steps and not novelty)
