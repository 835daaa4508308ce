"""Suite `tp_layer`: whole layers on several GPUs, against cuBLAS and NCCL, and against one GPU."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu import DTYPES, Gpu, Run, gpu_suite
from benchmarks.lengths import dense
from benchmarks.ranks import Ranks, join_ranks, overlap_measurement, ranks_us
from benchmarks.suite import Measurement, Suite
from benchmarks.tp_models import (
    Share,
    decode_batch,
    layers_run,
    prefill_batch,
    random_share,
    shared_layers,
    spec_of,
    without_kernels,
)
from bytetx.nn.blocks import LocalBlocks
from bytetx.nn.kv_cache import KvCache
from bytetx.nn.sharded_blocks import ShardedBlocks
from bytetx.ops.comm_workspace import workspace_bytes
from bytetx.packed import PackedBatch
from bytetx.parallel.row_scheme import RowScheme, row_scheme
from bytetx.parallel.tp import TpGroup

_CONTEXT = 128  # keys of a sequence that decodes
_LAYERS_OF_LARGE = 2  # whose weights are gigabytes
_LARGE = ("gpt3", "llama-70b")
_NOTE = (
    "times are of one layer; bytetx-nccl is ours with NCCL behind every kernel, cublas-nccl takes "
    "cuBLAS as well, and overlap stands between the faster of the two and the faster of both "
    "without NCCL; one-gpu is ours with the whole layer on each GPU"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """One case: the rows of a step. num_keys: of each sequence that decodes; None: a prefill."""

    name: str
    model: str
    lengths: np.ndarray
    num_keys: int | None = None
    dtype: str = "bf16"


def suite(*, patterns: list[str]) -> Suite:
    """The cases, for a process that torchrun started."""
    size = dist.get_world_size()
    cases = shapes(size)
    largest = max(int(shape.lengths.sum()) for shape in cases)
    sizes = {"hidden_size": 12288, "size": size, "itemsize": 2}
    ranks = join_ranks(workspace_bytes=workspace_bytes(max_tokens=largest, **sizes))
    measure_on = partial(measure, ranks=ranks)
    return gpu_suite("tp_layer", cases, measure_on, patterns=patterns, unit="us")


def shapes(size: int) -> list[Shape]:
    """Cases of `size` ranks: prefills full and ragged, decodes, of models large and small."""
    return [replace(shape, name=f"tp{size}-{shape.name}") for shape in _steps()]


def _steps() -> list[Shape]:
    found = []
    for model in _LARGE:
        found += [
            Shape(f"{model}-prefill-8x2048", model, dense(2048, 8)),
            Shape(f"{model}-prefill-a06-2048x8", model, _spread(2048, 8)),
        ]
        found += [_decode(model, num_seqs) for num_seqs in (64, 512)]
    return [
        *found,
        Shape("bert-large-1x128", "bert-large", dense(128, 1)),
        Shape("bert-large-a06-512x64", "bert-large", _spread(512, 64)),
        Shape("gpt2-xl-prefill-8x1024", "gpt2-xl", dense(1024, 8)),
        _decode("gpt2-xl", 64),
    ]


def _spread(longest: int, count: int) -> np.ndarray:
    """Lengths from a fifth of `longest` to all of it, 0.6 of it on average, in no order."""
    lengths = np.linspace(0.2 * longest, longest, count).round().astype(np.int64)
    return np.random.default_rng(0).permutation(lengths)


def _decode(model: str, num_seqs: int) -> Shape:
    return Shape(f"{model}-decode-{num_seqs}", model, dense(1, num_seqs), _CONTEXT)


class NoCollectives:
    """Collectives that move nothing: results of the right shapes, at once."""

    def __init__(self, rank: int):
        self._rank = rank
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def all_gather(self, shard: Tensor, row_offsets: Sequence[int]) -> Tensor:
        shape = (row_offsets[-1], *shard.shape[1:])
        if shape not in self._rows:
            self._rows[shape] = torch.randn(shape, dtype=shard.dtype, device=shard.device)
        return self._rows[shape]

    def reduce_scatter(self, partial: Tensor, row_offsets: Sequence[int]) -> Tensor:
        return partial[row_offsets[self._rank] : row_offsets[self._rank + 1]]

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial


def measure(shape: Shape, gpu: Gpu, *, ranks: Ranks) -> Measurement:
    """Ours; with NCCL instead, and cuBLAS; each rank's kernels alone, NCCL alone; one GPU."""
    torch.manual_seed(0)
    spec, dtype = spec_of(shape.model), DTYPES[shape.dtype]
    count = _LAYERS_OF_LARGE if shape.model in _LARGE else spec.num_layers
    group = replace(ranks.group, rows=row_scheme("cuda", ranks.size, spec.hidden_size))
    ours = shared_layers(spec, group, count=count, dtype=dtype)
    notes: list[str] = []
    found = ranks_us(_shared_runs(shape, ours, group), notes)
    del ours
    whole = random_share(spec, LocalBlocks(spec), count=count, dtype=dtype)
    runs = {"one-gpu": layers_run(whole, *_step(shape, whole))}
    found |= ranks_us(runs, notes, required=())
    sizes = {
        "batch_size": len(shape.lengths),
        "total_tokens": int(shape.lengths.sum()),
        "keys": shape.num_keys or 0,
        "layers": count,
        "tp": ranks.size,
    }
    per_layer = {name: us / count for name, us in found.items()}
    per_layer["gemm"] = min(per_layer["gemm"], per_layer.pop("cublas"))
    serial = min("bytetx-nccl", "cublas-nccl", key=per_layer.__getitem__)
    return overlap_measurement(per_layer, shape=sizes, notes=(*notes, _NOTE), serial=serial)


def _shared_runs(shape: Shape, ours: Share, group: TpGroup) -> dict[str, Run]:
    """Everything that all ranks do together."""
    spec, shard, count = ours.spec, ours.blocks.shard, len(ours.layers)
    assert shard is not None
    # NCCL takes equal shares, and would have others padded.
    rows = RowScheme(group.rows.shard_from_tokens, ((0, 1),))
    plain_group = replace(group, workspace=None, rows=rows)
    plain, silent = (ShardedBlocks(spec, plain_group, shard) for _ in range(2))
    silent.peers = replace(silent.peers, collectives=NoCollectives(group.rank))
    batch, cache = _step(shape, ours)
    return {
        "ours": layers_run(ours, batch, cache),
        "gemm": layers_run(replace(ours, blocks=silent), batch, cache),
        "cublas": layers_run(without_kernels(ours, silent), batch, cache),
        "nccl": partial(
            communicate,
            plain_group,
            shape,
            spec.hidden_size,
            count=count,
            dtype=ours.like.dtype,
        ),
        "bytetx-nccl": layers_run(replace(ours, blocks=plain), batch, cache),
        "cublas-nccl": layers_run(without_kernels(ours, plain), batch, cache),
    }


def _step(shape: Shape, share: Share) -> tuple[PackedBatch, KvCache | None]:
    if shape.num_keys is None:
        return prefill_batch(share, shape.lengths), None
    return decode_batch(share, num_seqs=len(shape.lengths), num_keys=shape.num_keys)


def communicate(
    group: TpGroup, shape: Shape, hidden_size: int, *, count: int, dtype: torch.dtype
) -> None:
    """The collectives of some layers, and nothing else: two halves each."""
    total = int(shape.lengths.sum())
    offsets = group.rows.offsets(total, group.size)
    rows = torch.empty(total, hidden_size, dtype=dtype, device=group.device)
    for _ in range(2 * count):
        if offsets is None:
            group.collectives.all_reduce(rows)
            continue
        own = rows[offsets[group.rank] : offsets[group.rank + 1]]
        group.collectives.all_gather(own, offsets)
        group.collectives.reduce_scatter(rows, offsets)
