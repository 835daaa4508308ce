"""Decode steps of one sequence on a GPU: one kernel for all layers, as exact as many."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_causal
from torch import Tensor

import bytetx
from bytetx.generate.cuda_steps import CudaSteps
from bytetx.model import Model
from bytetx.nn.one_sequence import OneSequence
from bytetx.runtime.paged_layout import PagedLayout, decode_layout
from bytetx.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

SIZES = {
    "hidden_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 2048,
}
# Other shapes with a kernel: an odd group of heads of 64; the same with biases.
OTHERS = {
    "llama": {
        **SIZES,
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
    },
    "qwen2": {
        **SIZES,
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 4864,
    },
}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_causal(tmp_path_factory.mktemp("one"), "qwen3", **SIZES)


def steps_of(model: Model) -> CudaSteps:
    steps = model.engine(kv_cache_tokens=2048, max_num_seqs=2)._runner._steps
    assert steps is not None
    return steps


def make_block(steps: CudaSteps, num_keys: int) -> tuple[PagedLayout, Tensor]:
    """The block of a step whose new token is the last of num_keys."""
    pages = np.random.default_rng(num_keys).permutation(steps._cache.num_pages).astype(np.int32)
    layout, last = decode_layout(1, len(pages)), num_keys - 1
    arrays = {
        "cu_seqlens": [0, 1],
        "kv_seqlens": [num_keys],
        "slot_indices": [0],
        "positions": [last],
        "slot_mapping": [pages[last // 16] * 16 + last % 16],
    }
    host = np.zeros(layout.num_ints, dtype=np.int32)
    table = {name: np.array(values, dtype=np.int32) for name, values in arrays.items()}
    layout.block.write(host, table | {"page_table": pages[None]}, fillers={})
    return layout, torch.from_numpy(host).cuda()


def error(x: Tensor, exact: Tensor) -> float:
    return ((x - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("num_keys", [1, 30, 1000])
def test_a_step_is_as_exact_as_by_many_kernels(folder: Path, num_keys: int) -> None:
    compare_steps(folder, num_keys)


@pytest.mark.parametrize("model_type", OTHERS)
def test_a_step_of_another_family_is_as_exact(tmp_path: Path, model_type: str) -> None:
    compare_steps(save_causal(tmp_path, model_type, **OTHERS[model_type]), num_keys=300)


def compare_steps(folder: Path, num_keys: int) -> None:
    """Against f32: twice the error of the kernels for any batch at most."""
    half = steps_of(bytetx.load(folder, device="cuda", dtype="bfloat16"))
    full = steps_of(bytetx.load(folder, device="cuda", dtype="float32"))
    one = half._one_sequence
    assert one is not None and full._one_sequence is None
    torch.manual_seed(0)
    for wide, narrow in zip(full._cache.layers, half._cache.layers, strict=True):
        for to, of in ((narrow.k_cache, wide.k_cache), (narrow.v_cache, wide.v_cache)):
            to.normal_()
            of.copy_(to)

    def run(steps: CudaSteps) -> Tensor:
        with torch.inference_mode():
            layout, block = make_block(steps, num_keys)
            return steps._compute(layout, False, block)[0].float()

    exact, ours = run(full), run(half)
    half._one_sequence = None
    assert error(ours, exact) <= 2 * error(run(half), exact)


@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_a_sequence_alone_runs_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cuda_graphs: bool
) -> None:
    model = bytetx.load(folder, device="cuda", dtype="bfloat16", cuda_graphs=cuda_graphs)
    num_calls = count_calls(monkeypatch)
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    alone = model.generate(prompts[:1], GREEDY)[0].token_ids
    assert len(alone) == GREEDY.max_tokens
    assert num_calls() > 0
    assert model.generate(prompts[:1], GREEDY)[0].token_ids == alone
    both = model.generate(prompts, GREEDY)
    assert [len(answer.token_ids) for answer in both] == [GREEDY.max_tokens] * 2


def count_calls(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often the kernel has been launched, captures among them."""
    calls, forward = [0], OneSequence.forward

    def counting(self: OneSequence, batch: object) -> Tensor:
        calls[0] += 1
        return forward(self, batch)

    monkeypatch.setattr(OneSequence, "forward", counting)
    return lambda: calls[0]


def test_models_of_other_sizes_run_as_before(tmp_path: Path) -> None:
    sizes = SIZES | {"intermediate_size": 2048}
    model = bytetx.load(save_causal(tmp_path, "qwen3", **sizes), device="cuda", dtype="bfloat16")
    assert steps_of(model)._one_sequence is None
    assert len(model.generate([[5, 6, 7]], GREEDY)[0].token_ids) == GREEDY.max_tokens
