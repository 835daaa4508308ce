"""Models with weights of 8 and 4 bits on a GPU: near fp32, exactly what they hold, small."""

from pathlib import Path

import pytest
import torch
from checkpoints import save_causal
from test_grouped_weights import BITS, FAMILIES, NEAR, SIZES, batch_of, folder_of, logits
from tiny import random_ids, save, tiny_model
from tiny_decoders import tiny_decoder

import bytetx
from bytetx.nn.loading import load_checkpoint
from bytetx.ops import grouped_blocks
from bytetx.ops.gated import GatedWeight
from bytetx.ops.grouped_blocks import GroupedBlocks
from bytetx.packed import pack

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda_backend")]

ENCODERS = ("bert", "modernbert", "deberta-v2")


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_weights_that_are_held(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(name, tmp_path)
    batch = batch_of(folder)
    loaded = load_checkpoint(folder, device="cuda", dtype=dtype)
    assert loaded.quantization == dtype and loaded.dtype == torch.float16
    got = logits(loaded, batch.to("cuda")).float()
    # Written out, the same numbers go through the GEMM of 16-bit weights.
    monkeypatch.setattr(grouped_blocks, "_MOST_FUSED_TOKENS", {})
    written = logits(loaded, batch.to("cuda")).float()
    assert (got - written).norm() < 5e-3 * written.norm()
    plain = logits(load_checkpoint(folder, device="cpu", dtype="float32"), batch)
    assert (got.cpu() - plain).norm() < NEAR[dtype] * plain.norm()


@pytest.mark.parametrize("dtype", BITS)
def test_a_loaded_model_is_as_small_as_its_bits(dtype: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 3008}
    folder = save(tiny_decoder("llama", **sizes, tie_word_embeddings=True), tmp_path)
    model = bytetx.load(folder, device="cuda", dtype=dtype)
    table = 3008 * 256
    in_layers = model.info()["num_parameters"] - table
    bits = {"int8": 8.5, "int4": 5}[dtype]
    assert model.info()["held_bytes"] < 1.1 * (in_layers * bits + table * 8.7) / 8
    head = model.checkpoint.heads.lm
    assert head is not None and isinstance(head.decoder, GroupedBlocks)
    coded = model.transformer.embeddings.coded
    assert coded is not None and head.decoder.codes is coded.codes


@pytest.mark.parametrize("dtype", BITS)
def test_generate_as_the_held_weights_do(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are graphs; sequences of one step and of many follow the written-out model's."""
    folder = save_causal(tmp_path, "qwen3", hidden_size=128, head_dim=32, intermediate_size=256)
    params = bytetx.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
    prompts = random_ids([3, 9, 1, 20, 7] * 5)
    model = bytetx.load(folder, device="cuda", dtype=dtype)
    alone = [model.generate([prompt], params)[0] for prompt in prompts[:5]]
    together = model.generate(prompts, params)
    monkeypatch.setattr(grouped_blocks, "_MOST_FUSED_TOKENS", {})
    wanted = bytetx.load(folder, device="cuda", dtype=dtype).generate(prompts, params)
    for found in (alone, together):
        for one, other in zip(found, wanted, strict=False):
            assert one.logprobs is not None and other.logprobs is not None
            assert abs(one.logprobs[0].logprob - other.logprobs[0].logprob) < 0.05


@pytest.mark.parametrize("cuda_backend", ["native"], indirect=True)
def test_a_batch_invariant_head_is_one(tmp_path: Path) -> None:
    folder = save_causal(tmp_path, "qwen3", hidden_size=128, head_dim=32, intermediate_size=256)
    loaded = load_checkpoint(folder, device="cuda", dtype="int4", batch_invariant=True)
    assert loaded.heads.lm is not None
    rows = torch.randn(40, 128, device="cuda", dtype=loaded.dtype)
    assert torch.equal(loaded.heads.lm.forward(rows)[:3], loaded.heads.lm.forward(rows[:3]))


@pytest.mark.feature("Arithmetic", "int8 and int4 weights of encoders on GPUs")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders_take_them(family: str, dtype: str, tmp_path: Path) -> None:
    folder = save(tiny_model(family, **SIZES), tmp_path)
    batch = pack(random_ids([5, 30]), has_token_types=True, position_offset=0)
    coded = load_checkpoint(folder, device="cuda", dtype=dtype).transformer
    plain = load_checkpoint(folder, device="cpu", dtype="float32").transformer.forward(batch)
    error = (coded.forward(batch.to("cuda")).float().cpu() - plain).norm() / plain.norm()
    assert error < NEAR[dtype] and coded.embeddings.coded is None
    for layer in coded.layers.weights:
        held = [w.fused if isinstance(w, GatedWeight) else w for w in layer.linears]
        assert all(isinstance(w, GroupedBlocks) and w.bits == BITS[dtype] for w in held)
