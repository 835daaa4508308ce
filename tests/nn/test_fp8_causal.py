"""Causal models with GEMMs of E4M3 rows: near fp32, codes of FP8 files kept, refusals by name."""

from pathlib import Path

import pytest
import tiny
import torch
from checkpoints import edit_json
from nomic_moe import save_nomic_moe
from quantised_files import save_quantised
from safetensors.torch import load_file, save_file
from test_grouped_weights import batch_of, folder_of, logits
from tiny_decoders import tiny_decoder
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import bytetx
from bytetx.checkpoint.weights import Weights
from bytetx.errors import InputError
from bytetx.nn.fp8 import RoundingLayerNorm, RoundingRmsNorm
from bytetx.nn.layer import ExpertFeedForward
from bytetx.nn.loading import load_checkpoint, load_spec
from bytetx.nn.transformer import Transformer
from bytetx.ops import native
from bytetx.ops.fp8_linear import Fp8LinearWeight
from bytetx.ops.gated import GatedWeight
from bytetx.ops.linear import LinearWeight
from bytetx.packed import pack

FAMILIES = ("llama", "qwen3", "gpt2", "opt", "gpt_neox")
# Each operand of a product is up to 2^-4 off, at random: in the mean 0.026; both are 0.037.
_ROUNDING, _GEMM_NOISE = 0.026, 0.037


def fp8_on_cpu(folder: Path, dtype: torch.dtype) -> Transformer:
    weights = Weights(folder, load_spec(folder)).cast(dtype)
    options = {"dtype": dtype, "device": "cpu", "prepack": False, "quantization": "fp8"}
    return Transformer.from_tensors(load_spec(folder), weights, **options)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_in_e4m3_and_their_router_is_not(name: str, tmp_path: Path) -> None:
    """Near a bf16 model: what chooses experts is rounded as little as there."""
    folder = folder_of(name, tmp_path)
    fp8 = fp8_on_cpu(folder, torch.bfloat16)
    mixtures = 0
    for layer in fp8.layers.weights:
        half = layer.feed_forward
        if isinstance(half, ExpertFeedForward):
            mixtures += 1
            matrices = [w.fused if isinstance(w, GatedWeight) else w for w in half.experts.first]
            assert all(isinstance(w, Fp8LinearWeight) for w in (*matrices, *half.experts.out))
            assert isinstance(half.experts.router, LinearWeight)
    assert mixtures
    got = fp8.forward(batch_of(folder)).float()
    plain = load_checkpoint(folder, device="cpu", dtype="bfloat16")
    expected = plain.transformer.forward(batch_of(folder)).float()
    # In the median: a row whose experts are almost tied may take another one.
    error = (got - expected).norm(dim=1) / expected.norm(dim=1)
    assert 1e-3 < error.median() < 2 * _GEMM_NOISE * 8**0.5


@pytest.mark.feature("Arithmetic", "FP8 of causal models on GPUs")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_hidden_states_stay_near_f32(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    fp8 = fp8_on_cpu(folder, dtype)
    for layer in fp8.layers.weights:
        assert isinstance(layer.attn_norm, RoundingLayerNorm | RoundingRmsNorm)
        for w in layer.linears:
            assert isinstance(w.fused if isinstance(w, GatedWeight) else w, Fp8LinearWeight)
    batch = batch_of(folder)
    got = fp8.forward(batch).float()
    expected = load_checkpoint(folder, device="cpu", dtype="float32").transformer.forward(batch)
    error = (got - expected).norm() / expected.norm()
    # Eight rounded products behind one another at most double what one of each adds up to.
    assert 1e-3 < error < 2 * _GEMM_NOISE * 8**0.5


def quantised(folder: Path, strategy: str) -> dict[str, torch.Tensor]:
    """Rewrites a folder as compressed-tensors saves a model in FP8; returns the tensors."""
    path = folder / "model.safetensors"
    saved: dict[str, torch.Tensor] = {}
    for name, t in load_file(path).items():
        if not name.endswith("proj.weight"):
            saved[name] = t
            continue
        scale = t.abs().amax(1, keepdim=True) if strategy == "channel" else t.abs().max()[None]
        scale = scale.float() / 417  # no code is the largest
        saved[name] = (t / scale).to(torch.float8_e4m3fn)
        saved[f"{name}_scale"] = scale
    save_file(saved, path, metadata={"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": strategy, "dynamic": False},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    edit_json(folder / "config.json", quantization_config=config)
    return saved


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_codes_of_compressed_tensors_are_kept(strategy: str, tmp_path: Path) -> None:
    """Their numbers are those that transformers computes, rows alone are rounded."""
    pytest.importorskip("compressed_tensors")
    folder = tiny.save(tiny_decoder("llama"), tmp_path)
    saved = quantised(folder, strategy)
    ours = fp8_on_cpu(folder, torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder,
        quantization_config=CompressedTensorsConfig(run_compressed=False),
        dtype=torch.float32,
    ).model
    for i, (layer, their) in enumerate(zip(ours.layers.weights, theirs.layers, strict=True)):
        attention = their.self_attn
        qkv, out, _, down = layer.linears
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        wanted = (torch.cat([one.weight for one in parts]), attention.o_proj.weight)
        for w, weight in zip((qkv, out, down), (*wanted, their.mlp.down_proj.weight), strict=True):
            assert isinstance(w, Fp8LinearWeight)
            assert torch.equal(w.rows.float() * w.scale[:, None], weight)
        codes = [saved[f"model.layers.{i}.self_attn.{one}_proj.weight"] for one in "qkv"]
        assert torch.equal(qkv.rows.view(torch.uint8), torch.cat(codes).view(torch.uint8))
    ids = tiny.random_ids([20, 1, 33, 7])
    got = ours.forward(pack(ids, has_token_types=False)).float()
    expected = torch.cat([theirs(torch.tensor([one])).last_hidden_state[0] for one in ids])
    assert (got - expected).norm() < 2 * _ROUNDING * 8**0.5 * expected.norm()


@pytest.mark.parametrize("case", ["fp8 per block", "fp8 per channel"])
def test_codes_that_are_rounded_again_are_named(case: str, tmp_path: Path) -> None:
    folder, _, _ = save_quantised(tmp_path, case)
    weights = Weights(folder, load_spec(folder))
    options = {"dtype": torch.bfloat16, "device": "cpu", "prepack": False, "quantization": "fp8"}
    Transformer.from_tensors(load_spec(folder), weights.cast(torch.bfloat16), **options)
    assert ("FP8" in weights.dequantised) == (case == "fp8 per block")


def test_experts_and_cpus_are_refused_by_name(tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path / "llama")
    with pytest.raises(InputError, match="dtype fp8 cannot run on cpu: .*; use dtype float16"):
        bytetx.load(folder, device="cpu", dtype="fp8")
    folder = tmp_path / "nomic"
    save_nomic_moe(folder)
    with pytest.raises(InputError, match="dtype fp8 is not for the experts of nomic_bert"):
        bytetx.load(folder, device="cpu", dtype="fp8")


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_on_a_gpu_are_near_those_of_float32(name: str, tmp_path: Path) -> None:
    if native.why_no_kernel("fp8_linear", torch.device("cuda")) is not None:
        pytest.skip("no kernel for this GPU")
    folder = folder_of(name, tmp_path)
    batch = batch_of(folder)
    got = logits(load_checkpoint(folder, device="cuda", dtype="fp8"), batch.to("cuda"))
    expected = logits(load_checkpoint(folder, device="cpu", dtype="float32"), batch)
    error = (got.float().cpu() - expected).norm() / expected.norm()
    assert error < 2 * _GEMM_NOISE * 8**0.5


@pytest.mark.gpu
def test_sequences_together_get_the_tokens_of_each_alone(tmp_path: Path) -> None:
    if native.why_no_kernel("fp8_linear", torch.device("cuda")) is not None:
        pytest.skip("no kernel for this GPU")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    folder = tiny.save(tiny_decoder("llama", **sizes), tmp_path)
    model = bytetx.load(folder, device="cuda", dtype="fp8")
    params = bytetx.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    prompts = tiny.random_ids([3, 9, 1, 20, 7])
    together = [list(one.token_ids) for one in model.generate(prompts, params)]
    alone = [list(model.generate([one], params)[0].token_ids) for one in prompts]
    assert together == alone
