"""Causal models with weights of 8 and 4 bits on a CPU: near fp32, exactly what they hold, small."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny import random_ids, save, tiny_model
from tiny_decoders import tiny_decoder
from torch import Tensor

import bytetx
from bytetx.checkpoint.weights import Weights
from bytetx.errors import InputError
from bytetx.generate import model_runner
from bytetx.nn.cpu_steps import CpuSteps
from bytetx.nn.loading import LoadedCheckpoint, load_checkpoint, load_spec
from bytetx.nn.quantization import wanted_quantization
from bytetx.nn.transformer import Transformer
from bytetx.ops import reference
from bytetx.ops.grouped_linear import GROUP, GroupedWeight, prepare_grouped_linear
from bytetx.ops.linear import LinearWeight
from bytetx.ops.panel_linear import why_no_panels
from bytetx.ops.weight import QuantizedWeight
from bytetx.packed import PackedBatch, pack

pytestmark = pytest.mark.skipif(
    why_no_panels() is not None, reason=f"weights in groups: {why_no_panels()}"
)

FAMILIES = ("llama", "qwen3", "gpt2", "opt", "gpt_neox")
BITS = {"int8": 8, "int4": 4}
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
# Relative errors of logits: about eight products behind one another, each with rows that are 0.005
# and weights that are 0.005 or 0.07 off.
NEAR = {"int8": 0.06, "int4": 0.4}


@dataclass(frozen=True, slots=True)
class RoundedRows(QuantizedWeight):
    """The matrix of a weight in groups, multiplied in f64 with rows rounded as that rounds them."""

    matrix: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    sum_bias: Tensor | None = None

    @property
    def n(self) -> int:
        return self.matrix.shape[0]

    @property
    def k(self) -> int:
        return self.matrix.shape[1]

    def shard(self, *, outputs: range | None = None, inputs: range | None = None) -> "RoundedRows":
        raise NotImplementedError

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        groups = torch.nn.functional.pad(x.float(), (0, -self.k % GROUP)).unflatten(1, (-1, GROUP))
        largest = groups.abs().amax(2, keepdim=True).clamp(min=1e-30)
        codes = (groups * (torch.full_like(largest, 127.0) / largest)).round()
        rows = (codes * (largest / 127.0)).double().flatten(1)[:, : self.k]
        d = rows @ self.matrix.double().T
        d = d if self.bias is None else d + self.bias.double()
        d = reference.activate(d, activation).to(self.dtype)
        return d if residual is None else d.add_(residual)


def rounded_rows(plain: LinearWeight, bits: int) -> RoundedRows:
    w = prepare_grouped_linear(plain, bits=bits)
    return RoundedRows(w.restored, w.bias, w.dtype)


def folder_of(name: str, folder: Path) -> Path:
    return save(tiny_decoder(name), folder)


def batch_of(folder: Path) -> PackedBatch:
    spec = load_spec(folder)
    ids = random_ids([20, 1, 33, 7])
    return pack(ids, has_token_types=False, position_offset=spec.position_offset)


def logits(loaded: LoadedCheckpoint, batch: PackedBatch) -> Tensor:
    assert loaded.heads.lm is not None
    return loaded.heads.lm.forward(loaded.transformer.forward(batch))


def exact_logits(folder: Path, bits: int) -> Tensor:
    """Those of the weights that are held, with rows rounded alike and sums in f64."""
    spec = load_spec(folder)
    plain = load_checkpoint(folder, device="cpu", dtype="float32")
    model = Transformer.from_tensors(
        spec, Weights(folder, spec), dtype=torch.float32, device="cpu", prepack=False
    )
    model.layers.weights = [
        layer.converted(lambda w: rounded_rows(w, bits)) for layer in model.layers.weights
    ]
    words = LinearWeight(
        model.embeddings.word,
        None,
        *model.embeddings.word.shape,
        torch.float32,
        is_prepacked=False,
        has_kernel=False,
    )
    table = prepare_grouped_linear(words, bits=8).restored
    model.embeddings = replace(model.embeddings, word=table)
    head = plain.heads.lm
    assert head is not None
    tensors = Weights(folder, spec)
    name = spec.heads["lm"].decoder
    decoder = words if name not in tensors else replace(words, weight=tensors[name].float())
    bias = None if spec.heads["lm"].bias is None else tensors[spec.heads["lm"].bias].float()
    rows = model.forward(batch_of(folder))
    return rounded_rows(replace(decoder, bias=bias), 8).matmul(rows)


@pytest.mark.feature("Arithmetic", "int8 and int4 weights of causal models on CPUs")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_the_weights_that_are_held(
    name: str, dtype: str, tmp_path: Path
) -> None:
    folder, batch = folder_of(name, tmp_path), batch_of(folder_of(name, tmp_path))
    loaded = load_checkpoint(folder, device="cpu", dtype=dtype)
    assert loaded.quantization == dtype
    if loaded.dtype == torch.float32:
        # A code of a row flips where f32 sums differ in their last bit: a step of 1/127 then.
        got, wanted = logits(loaded, batch), exact_logits(folder, BITS[dtype])
        assert (got - wanted).norm() < 2e-3 * wanted.norm()
    plain = logits(load_checkpoint(folder, device="cpu", dtype="float32"), batch)
    error = (logits(loaded, batch).float() - plain).norm() / plain.norm()
    assert error < NEAR[dtype]


@pytest.mark.parametrize("dtype", BITS)
def test_a_loaded_model_is_as_small_as_its_bits(dtype: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 3000}
    folder = save(tiny_decoder("llama", **sizes, tie_word_embeddings=True), tmp_path)
    model = bytetx.load(folder, device="cpu", dtype=dtype)
    layers = sum(layer.num_bytes for layer in model.transformer.layers.weights)
    table = 3000 * 256
    in_layers = model.info()["num_parameters"] - table
    bits = {"int8": 8.5, "int4": 5}[dtype]
    assert layers < 1.05 * in_layers * bits / 8
    # Table and head are one matrix of 8 bits and scales.
    held = model.info()["held_bytes"]
    assert held < 1.1 * (in_layers * bits + table * 8.7) / 8
    head = model.checkpoint.heads.lm
    assert head is not None and isinstance(head.decoder, GroupedWeight)
    coded = model.transformer.embeddings.coded
    assert coded is not None and head.decoder.strips is coded.strips
    assert model.info()["dtype"].startswith(dtype)


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2"])
def test_generate_with_any_number_of_sequences(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(name, tmp_path)
    model = bytetx.load(folder, device="cpu", dtype=dtype)
    params = bytetx.SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    prompts = random_ids([3, 9, 1, 20, 7] * 3 + [2, 2])
    alone = [model.generate([prompt], params)[0].token_ids for prompt in prompts]
    for count in (1, 3, 17):
        together = model.generate(prompts[:count], params)
        assert [result.token_ids for result in together] == alone[:count]
    assert model_runner.CpuSteps is CpuSteps
    monkeypatch.setattr(CpuSteps, "of", lambda transformer, cache: None)
    slow = bytetx.load(folder, device="cpu", dtype=dtype).generate(prompts[:3], params)
    assert [result.token_ids for result in slow] == alone[:3]


@pytest.mark.parametrize("dtype", BITS)
def test_other_tasks(dtype: str, tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    model, exact = (bytetx.load(folder, device="cpu", dtype=d) for d in (dtype, "float32"))
    prompts = random_ids([9, 4, 17])
    for got, wanted in zip(model.score(prompts), exact.score(prompts), strict=True):
        assert abs(got.log_likelihood / wanted.log_likelihood - 1) < NEAR[dtype]


def test_encoders_take_int4(tmp_path: Path) -> None:
    folder = save(tiny_model("bert", **SIZES), tmp_path)
    batch = pack(random_ids([5, 30]), has_token_types=True, position_offset=0)
    coded = load_checkpoint(folder, device="cpu", dtype="int4").transformer
    plain = load_checkpoint(folder, device="cpu", dtype="float32").transformer.forward(batch)
    error = (coded.forward(batch).float() - plain).norm() / plain.norm()
    assert error < NEAR["int4"] and coded.embeddings.coded is None


@pytest.mark.parametrize("dtype", BITS)
def test_where_it_cannot_run(dtype: str, tmp_path: Path) -> None:
    folder = folder_of("llama", tmp_path)
    with pytest.raises(InputError, match=f"dtype {dtype} runs in one process; leave out tp"):
        bytetx.load(folder, device="cpu", dtype=dtype, tp=2)
    with pytest.raises(InputError, match=f"dtype {dtype} cannot run on cuda:0: .*; use bfloat16"):
        wanted_quantization(dtype, load_spec(folder), torch.device("cuda", 0))
