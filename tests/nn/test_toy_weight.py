"""A kind of weight that this file alone adds: 4-bit integers, loaded, multiplied and divided."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from tiny import random_ids, save, tiny_model
from tiny_decoders import tiny_decoder
from torch import Tensor

import bytetx
from bytetx.checkpoint.demo import demo_checkpoint
from bytetx.checkpoint.weights import Weights
from bytetx.nn.grid_blocks import grid_blocks, grid_transformer
from bytetx.nn.loading import load_checkpoint, load_spec
from bytetx.nn.quantization import WEIGHT_FORMATS, WeightFormat
from bytetx.nn.transformer import Transformer
from bytetx.ops import reference
from bytetx.ops.gated import prepare_gated
from bytetx.ops.int8_linear import prepare_int8_linear, why_no_int8_linear
from bytetx.ops.linear import LinearWeight, prepare_linear, taken
from bytetx.ops.weight import QuantizedWeight, Weight
from bytetx.packed import PackedBatch, pack
from bytetx.parallel.grid import parse_grid
from bytetx.parallel.tp import TpGroup

GROUP = 8  # inputs of one scale: a rank's share of them is some of the groups
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
# f32 sums of up to 96 products in another order, through two or three layers.
TOLERANCE = 5e-5


@dataclass(frozen=True, slots=True)
class Int4Weight(QuantizedWeight):
    """Two features a byte, with a scale for each group."""

    pairs: Tensor  # uint8 [n, k / 2]
    scale: Tensor  # f32 [n, k / GROUP]
    bias: Tensor | None
    dtype: torch.dtype
    sum_bias: Tensor | None = None

    @property
    def n(self) -> int:
        return self.pairs.shape[0]

    @property
    def k(self) -> int:
        return 2 * self.pairs.shape[1]

    @property
    def restored(self) -> Tensor:
        w = torch.stack((self.pairs & 15, self.pairs >> 4), 2).flatten(1).float() - 8
        return (w.unflatten(1, (-1, GROUP)) * self.scale[:, :, None]).flatten(1).to(self.dtype)

    def shard(self, *, outputs: range | None = None, inputs: range | None = None) -> "Int4Weight":
        pairs, scale = taken(self.pairs, outputs), taken(self.scale, outputs)
        bias, sum_bias = taken(self.bias, outputs), taken(self.sum_bias, outputs)
        if inputs is not None:
            pairs = taken(pairs, range(inputs.start // 2, inputs.stop // 2), dim=1)
            scale = taken(scale, range(inputs.start // GROUP, inputs.stop // GROUP), dim=1)
            bias, sum_bias = None, sum_bias if bias is None else bias
        return Int4Weight(pairs, scale, bias, self.dtype, sum_bias)

    def matmul(
        self, x: Tensor, *, activation: str = "none", residual: Tensor | None = None
    ) -> Tensor:
        d = reference.activate(F.linear(x, self.restored, self.bias), activation)
        return d if residual is None else d.add_(residual)


def prepare_int4(plain: LinearWeight) -> Int4Weight:
    groups = plain.weight.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(2).clamp(min=1e-12) / 7
    w = ((groups / scale[:, :, None]).round() + 8).to(torch.uint8).flatten(1)
    pairs = w[:, ::2] | (w[:, 1::2] << 4)
    return Int4Weight(pairs, scale, plain.bias, plain.dtype, plain.sum_bias)


@pytest.fixture(autouse=True)
def toy4(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made = WeightFormat(
        check=lambda spec, device: None,
        quantize=lambda layer, is_last: layer.converted(prepare_int4),
    )
    monkeypatch.setitem(WEIGHT_FORMATS, "toy4", made)
    yield


def folder_of(name: str, folder: Path) -> Path:
    sizes = {} if name == "mixtral" else SIZES
    model = tiny_model(name, **sizes) if name == "bert" else tiny_decoder(name, **sizes)
    return save(model, folder)


def batch_of(folder: Path) -> PackedBatch:
    spec = load_spec(folder)
    ids = random_ids([20, 1, 33, 7])
    return pack(ids, has_token_types=spec.num_token_types > 0, position_offset=spec.position_offset)


def rounded_states(folder: Path) -> Tensor:
    """States of a plain model whose matrices are what 4 bits leave of them."""
    spec = load_spec(folder)
    exact = Transformer.from_tensors(
        spec, Weights(folder, spec), dtype=torch.float32, device="cpu", prepack=False
    )
    exact.layers.weights = [
        layer.converted(lambda w: replace(w, weight=prepare_int4(w).restored))
        for layer in exact.layers.weights
    ]
    return exact.forward(batch_of(folder))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gpt_neox", "mixtral"])
def test_encoders_and_decoders_multiply_it(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    loaded = load_checkpoint(folder, device="cpu", dtype="toy4")
    assert loaded.quantization == "toy4"
    found = loaded.transformer.forward(batch_of(folder))
    torch.testing.assert_close(found, rounded_states(folder), rtol=0, atol=TOLERANCE)
    plain = load_checkpoint(folder, device="cpu", dtype="float32")
    for ours, theirs in zip(
        loaded.transformer.layers.weights, plain.transformer.layers.weights, strict=True
    ):
        # Half a byte, and a scale of four bytes for eight features: a byte of a feature's four.
        assert theirs.num_bytes / 4 <= ours.num_bytes < theirs.num_bytes / 3


@pytest.mark.parametrize("axes", ["y2", "x2", "y2.x2"])
@pytest.mark.parametrize("name", ["bert", "llama", "gpt_neox"])
def test_ranks_divide_it(name: str, axes: str, tmp_path: Path) -> None:
    folder, grid = folder_of(name, tmp_path), parse_grid(axes)
    wanted, spec = rounded_states(folder), load_spec(folder)
    batch = batch_of(folder)
    whole = load_checkpoint(folder, device="cpu", dtype="toy4").transformer.layers.weights

    def do(group: TpGroup) -> tuple[Tensor, int]:
        blocks = grid_blocks(spec, group)
        local = load_checkpoint(folder, device="cpu", dtype="toy4", blocks=blocks).transformer
        num_bytes = sum(layer.num_bytes for layer in local.layers.weights)
        return grid_transformer(local, group).forward(batch), num_bytes

    results = on_ranks(grid.size, do, grid=grid)
    for found, _ in results:
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE)
    held, all_bytes = sum(n for _, n in results), sum(layer.num_bytes for layer in whole)
    assert all_bytes <= held < 1.1 * all_bytes  # sums' biases are on every rank


def test_vectors_and_new_tokens(tmp_path: Path) -> None:
    texts = ["a short text", "another one that is longer than the first"]
    got = bytetx.load(demo_checkpoint(), device="cpu", dtype="toy4").embed(texts).vectors
    exact = bytetx.load(demo_checkpoint(), device="cpu").embed(texts).vectors
    assert 0.9 < np.sum(got * exact, 1).min() < 0.9999
    model = bytetx.load(folder_of("llama", tmp_path), device="cpu", dtype="toy4")
    (result,) = model.generate([[5, 6, 7]], bytetx.SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(result.token_ids) == 4


def _kinds() -> list[tuple[str, Weight]]:
    torch.manual_seed(0)
    plain = prepare_linear(torch.randn(96, 64), torch.randn(96), prepack=False)
    gate, up = torch.randn(96, 64), torch.randn(96, 64)
    biases = {"gate_bias": torch.randn(96), "up_bias": torch.randn(96)}
    gated = prepare_gated(gate, up, **biases, prepack=False)
    kinds = [("dense", plain), ("gated", gated), ("int4", prepare_int4(plain))]
    kinds.append(("gated int4", gated.with_matrix(prepare_int4(gated.dense))))
    if why_no_int8_linear() is None:
        kinds.append(("int8", prepare_int8_linear(plain)))
    return kinds


@pytest.mark.parametrize("kind", _kinds(), ids=lambda kind: kind[0])
def test_shards_of_every_kind_make_the_whole(kind: tuple[str, Weight]) -> None:
    name, w = kind
    x, activation = torch.randn(5, 64), "silu" if w.block else "relu"
    wanted = w.matmul(x, activation=activation)
    halves = [w.shard(outputs=part) for part in (range(0, 64), range(64, 96))]
    columns = torch.cat([half.matmul(x, activation=activation) for half in halves], 1)
    torch.testing.assert_close(columns, wanted, rtol=1e-5, atol=1e-5)
    assert sum(half.num_bytes for half in halves) == w.num_bytes
    if name == "int8":  # a row's range of values is that of its share of the features
        x[:, 0], x[:, 1], x[:, 32], x[:, 33] = 4, -4, 4, -4
        wanted = w.matmul(x, activation=activation)
    rows = [w.shard(inputs=part) for part in (range(0, 32), range(32, 64))]
    sums = [one.product(part.contiguous()) for one, part in zip(rows, x.chunk(2, 1), strict=True)]
    assert rows[0].sum_bias is not None
    whole = w.activated(sums[0] + sums[1] + rows[0].sum_bias, activation)
    torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-4)
