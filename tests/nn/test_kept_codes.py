"""Checkpoints of few bits on a GPU: layers keep their codes, and mean what the files mean.

On a CPU, where a test asks for it, in float32 and by plain torch.
"""

import json
from pathlib import Path

import pytest
import torch
from gguf_files import WIDE, write_blocks
from quantised_files import SCHEMES, save_quantised
from tiny import random_ids, save
from tiny_decoders import tiny_decoder
from torch import Tensor

import bytetx
from bytetx.checkpoint.files import resolve_checkpoint
from bytetx.checkpoint.weights import Weights
from bytetx.cli.commands import main
from bytetx.errors import CheckpointError
from bytetx.nn import kept_codes, quantization
from bytetx.nn.kept_codes import kept_bits
from bytetx.nn.loading import LoadedCheckpoint, load_checkpoint, load_spec
from bytetx.nn.quantization import SAVED
from bytetx.nn.tensors import TensorLoader
from bytetx.ops.coded_rows import GROUP
from bytetx.ops.gated import GatedWeight
from bytetx.ops.group_rows import number_count
from bytetx.ops.grouped_blocks import GroupedBlocks
from bytetx.ops.stacked_weight import StackedWeight
from bytetx.ops.weight import Weight
from bytetx.packed import pack

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
# Formats of which a GPU keeps every code, and the bits of a weight in its memory.
KEPT = {
    "int8": 9,
    "gptq": 5,
    "gptq 8 bits": 9,
    "gptq one group": 5,
    "gptq by activations": 5,
    "gptq v2": 5,
    "awq": 5,
    "awq 8 bits": 9,
    "int4 packed": 9,
    "int8 packed": 8.5,
    "bitsandbytes int8": 8.5,
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of GGUF files are kept below it; the CPU keeps codes as a GPU does."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    if DEVICE == "cpu":
        monkeypatch.setattr(quantization, "keeps_codes", lambda *args: True)


def parts_of(w: Weight) -> list[Weight]:
    w = w.fused if isinstance(w, GatedWeight) else w
    return list(w.parts) if isinstance(w, StackedWeight) else [w]


def matrix(w: Weight) -> Tensor:
    """The matrix that a layer stands for, f32, gates and values in turn as they are in memory."""
    own = [p.restored if isinstance(p, GroupedBlocks) else p.dense.weight for p in parts_of(w)]
    dense = [one.to_dense() if one.is_mkldnn else one.float() for one in own]
    found = torch.cat(dense)
    if isinstance(w, GatedWeight) and w.block != 32:
        return found.unflatten(0, (2, -1, 32)).transpose(0, 1).flatten(0, 2)
    return found


def logits(loaded: LoadedCheckpoint) -> Tensor:
    batch = pack(random_ids([20, 1, 33]), has_token_types=False, position_offset=0)
    assert loaded.heads.lm is not None
    rows = loaded.transformer.forward(batch.to(loaded.device))
    return loaded.heads.lm.forward(rows).float().cpu()


def check_same(folder: Path, *, near: float = 0.0) -> LoadedCheckpoint:
    """near: of a matrix's largest weight, for scales that numbers of 16 bits do not hold."""
    loaded = load_checkpoint(folder, device=DEVICE, dtype="auto")
    plain = plain_model(folder)
    assert loaded.quantization == SAVED and loaded.dtype_option == "auto"
    half = load_checkpoint(folder, device=DEVICE, dtype=loaded.dtype)
    rounding = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[loaded.dtype]
    for ours, theirs in zip(
        loaded.transformer.layers.weights, plain.transformer.layers.weights, strict=True
    ):
        for w, dense in zip(ours.linears, theirs.linears, strict=True):
            got, wanted = matrix(w).cpu(), matrix(dense)
            limit = near if loaded.dtype != torch.float32 else 0
            assert (got - wanted).abs().max() <= max(limit, rounding) * wanted.abs().max()
    got, wanted, by_numbers = logits(loaded), logits(plain), logits(half)
    if by_numbers.isfinite().all():  # some of these weights are large
        # Scales are rounded as well as weights.
        error = 3 * (by_numbers - wanted).norm() + 4 * rounding * wanted.norm()
        assert (got - wanted).norm() < error
    return loaded


def plain_model(folder: Path) -> LoadedCheckpoint:
    return load_checkpoint(folder, device="cpu", dtype=torch.float32)


@pytest.mark.feature("Checkpoints", "GPTQ, AWQ and packed integers kept as codes on GPUs")
@pytest.mark.parametrize("case", KEPT)
def test_layers_keep_what_a_checkpoint_saves(case: str, tmp_path: Path) -> None:
    folder, _, _ = save_quantised(tmp_path, case)
    loaded = check_same(folder)
    held = [p for layer in loaded.transformer.layers.weights for w in layer.linears
            for p in parts_of(w)]  # fmt: skip
    kept = [w for w in held if isinstance(w, GroupedBlocks)]
    assert len(held) == len(kept) + 1  # one layer was left out by the tool
    assert {w.bits + 16 * number_count(w.form) / GROUP for w in kept} == {KEPT[case]}
    assert not loaded.dequantised
    assert load_checkpoint(folder, device=DEVICE, dtype="float16").quantization is None


@pytest.mark.parametrize(
    "case, reason",
    [
        ("bitsandbytes nf4", "no multiples of a scale"),
        ("mxfp4", "no multiples of a scale"),
        ("int4 packed with zeros", "groups of 16 features with zero points"),
    ],
)
def test_what_has_no_place_is_held_as_numbers(case: str, reason: str, tmp_path: Path) -> None:
    folder, _, _ = save_quantised(tmp_path, case)
    spec = load_spec(folder)
    weights = Weights(folder, spec)
    if DEVICE == "cuda":
        assert load_checkpoint(folder, device=DEVICE, dtype="auto").quantization is None
    load = TensorLoader(
        weights.cast(torch.float32), dtype=torch.float32, device="cpu", prepack=False
    )
    name = "layers.0.mlp.up_proj.weight"
    found = load.keeping_codes().matrix(name, weights.shape(name))
    assert isinstance(found, Tensor)
    assert [reason in why for why in weights.dequantised.values()] == [True]
    assert list(weights.dequantised) == [SCHEMES[case][2]]


@pytest.mark.parametrize("acts", [False, True])
def test_groups_of_inputs_with_other_sizes(acts: bool, tmp_path: Path) -> None:
    """An order of inputs makes groups of neighbours only where all have one size."""
    case = "gptq by activations"
    folder, wanted, _ = save_quantised(tmp_path, case)
    spec = load_spec(folder)
    weights = Weights(folder, spec)
    name = "layers.0.mlp.up_proj.weight"
    stored = weights.stored(name)
    saved = stored.raw["g_idx"]  # type: ignore[union-attr]
    index = saved.read_raw()
    if acts:
        with saved.path.open("r+b") as file:
            file.seek(saved.offset)
            index[index == 1] = 0
            file.write(index.numpy().tobytes())
    rows = kept_codes.read_rows(weights, name, torch.device("cpu"))
    if acts:
        assert rows is None and "different sizes" in weights.dequantised[SCHEMES[case][2]]
    else:
        assert rows is not None and rows.order is not None
        assert torch.equal(rows.values, wanted[name])


@pytest.mark.feature("Checkpoints", "GGUF codes kept on GPUs")
@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_layers_keep_a_gguf_file_s_codes(kind: str, tmp_path: Path) -> None:
    file = write_blocks(tmp_path / "model.gguf", {"": kind})
    folder = resolve_checkpoint(file)
    loaded = check_same(folder, near=2**-7)
    bits = {"Q4_0": 5, "Q4_1": 5, "Q4_K": 5, "Q5_0": 8.5, "Q8_0": 8.5}.get(kind, 9)
    for layer in loaded.transformer.layers.weights:
        assert all(isinstance(p, GroupedBlocks) for w in layer.linears for p in parts_of(w))
    coded = loaded.transformer.embeddings.coded
    assert isinstance(coded, GroupedBlocks) and loaded.heads.lm is not None
    plain = plain_model(folder)
    near = 2**-7 if loaded.dtype == torch.bfloat16 else 1e-6
    word = plain.transformer.embeddings.word
    assert (coded.restored.cpu() - word).abs().max() <= near * word.abs().max()
    info = bytetx.load(file, device=DEVICE).info()
    assert bits <= info["held_bits"] < 1.25 * bits + 0.5
    assert info["dtype"].startswith("codes as saved (") and info["dequantised_formats"] == {}
    spec = load_spec(folder)
    assert bits <= kept_bits(Weights(folder, spec), torch.bfloat16) < bits + 0.5


def test_formats_are_mixed_in_one_layer(tmp_path: Path) -> None:
    """As in Q4_K_M: v and the way back have more bits; here up has others than the gate, too, and
    the table none that can be kept."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "ffn_up": "Q5_0", "token_embd": "Q2_K"}
    file = write_blocks(tmp_path / "model.gguf", kinds | {"": "Q4_K"})
    loaded = check_same(resolve_checkpoint(file), near=2**-7)
    qkv, _, gated, down = loaded.transformer.layers.weights[0].linears
    assert [p.bits for p in parts_of(qkv)] == [4, 8] and parts_of(qkv)[0].n == 256 + 128
    assert [p.bits for p in parts_of(gated)] == [4, 8] and parts_of(down)[0].form == "halves"
    assert loaded.transformer.embeddings.coded is None
    assert "least values" in loaded.dequantised["Q2_K"]
    half = qkv.shard(outputs=range(300, 448))
    x = torch.randn(5, 256, device=DEVICE).to(loaded.dtype)
    assert torch.allclose(half.matmul(x), qkv.matmul(x)[:, 300:448], rtol=1e-3, atol=1e-3)
    assert half.num_bytes < qkv.num_bytes


def test_what_is_added_to_a_weight_makes_it_one_of_numbers(tmp_path: Path) -> None:
    file = write_blocks(tmp_path / "model.gguf", {"": "Q4_0"})
    spec = load_spec(resolve_checkpoint(file))
    weights = Weights(resolve_checkpoint(file), spec).cast(torch.float32)

    class One:
        needs_all = False

        def apply_to(self, weight: Tensor, part: object) -> None:
            weight += 1

    name = "layers.0.mlp.down_proj.weight"
    weights._added = {name: [One()]}  # type: ignore[dict-item]
    assert kept_codes.read_rows(weights, name, torch.device("cpu")) is None


def test_scales_that_are_not_finite_are_named(tmp_path: Path) -> None:
    file = write_blocks(tmp_path / "model.gguf", {"": "Q8_0"})
    spec = load_spec(resolve_checkpoint(file))
    stored = Weights(resolve_checkpoint(file), spec).stored("layers.1.mlp.down_proj.weight")
    saved = stored.raw["blocks"]  # type: ignore[union-attr]
    with saved.path.open("r+b") as opened:
        opened.seek(saved.offset)
        opened.write(b"\x00\x7c")
    with pytest.raises(CheckpointError, match=r"down_proj.*not finite"):
        load_checkpoint(resolve_checkpoint(file), device=DEVICE, dtype="auto")


def test_encoders_and_plain_checkpoints_are_loaded_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    folder = save(tiny_decoder("llama", **WIDE), tmp_path)
    assert load_checkpoint(folder, device=DEVICE, dtype="auto").quantization is None
    spec = load_spec(folder)
    assert not kept_codes.keeps_codes(spec, Weights(folder, spec), torch.device("cuda"))


def test_tokens_of_kept_codes_are_those_of_the_numbers(tmp_path: Path) -> None:
    file = write_blocks(tmp_path / "model.gguf", {"attn_v": "Q6_K", "": "Q4_K"})
    params = bytetx.SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    prompts = random_ids([9, 3, 17])
    dtypes = ("auto", "float32" if DEVICE == "cpu" else "bfloat16")
    kept, plain = (bytetx.load(file, device=DEVICE, dtype=dtype) for dtype in dtypes)
    for one, other in zip(kept.generate(prompts, params), plain.generate(prompts, params),
                          strict=True):  # fmt: skip
        assert one.logprobs is not None and other.logprobs is not None
        assert abs(one.logprobs[0].logprob - other.logprobs[0].logprob) < 0.05


def test_plan_counts_what_one_gpu_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_blocks(tmp_path / "model.gguf", {"": "Q8_0"})
    folder = str(resolve_checkpoint(file))

    def weights_bytes(*more: str) -> int:
        with pytest.raises(SystemExit):
            main(["plan", "--model", folder, "--lengths", "16", "--json", *more])
        return int(json.loads(capsys.readouterr().out)["grids"][0]["weights_bytes"])

    plain = weights_bytes("--gpus", "1", "--dtype", "bfloat16")
    assert weights_bytes("--gpus", "1") / plain == pytest.approx(8.5 / 16, rel=0.01)
    two = weights_bytes("--gpus", "2")
    assert two == weights_bytes("--gpus", "2", "--dtype", "bfloat16")
