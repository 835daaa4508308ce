"""ColBERT's scores of packed vectors: products that never leave the chip.

A program holds a tile of query vectors, whatever queries they are of, and goes through tiles of
documents: it writes each document's largest product with each vector. A second kernel adds up each
query's. The host cuts the documents into tiles, so that the loop over them is one, and pipelined.
For one query that fits a tile the host's time is what counts: a program scores a document.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops import host
from bytetx.ops.triton_kernels.launch import (
    dot_precision,
    launch,
    next_power_of_2,
    num_multiprocessors,
)

_FEATURES = 128  # features per product; longer vectors are multiplied in parts
_DOCUMENTS = 16  # the most documents per program
_WAVES = 8
_TILE, _TILE_F32 = 64, 32  # document vectors
MAX_ONE_QUERY = 64  # vectors: what fits a tile in every dtype
_SUM_DOCUMENTS, _SUM_VECTORS = 64, 32


@triton.jit
def _nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _products(
    q,
    query_rows,
    document_rows,
    size,
    CHUNKS: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of query and document vectors; q: the former, where all features are in one part."""
    features = tl.arange(0, FEATURES)
    if CHUNKS == 1:
        mask = (features < size)[None, :]
        d = tl.load(document_rows + features[None, :], mask=mask, other=0.0)
        return tl.dot(q, tl.trans(d), input_precision=PRECISION)
    acc = tl.zeros((query_rows.shape[0], document_rows.shape[0]), tl.float32)
    for part in range(CHUNKS):
        at = part * FEATURES + features
        is_feature = (at < size)[None, :]
        a = tl.load(query_rows + at[None, :], mask=is_feature, other=0.0)
        d = tl.load(document_rows + at[None, :], mask=is_feature, other=0.0)
        acc = tl.dot(a, tl.trans(d), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _query_tile(queries, rows, num_vectors, size, FEATURES: tl.constexpr):
    """(addresses of the rows' vectors, their first features).

    Rows past the end repeat the last: no product needs a mask, and no maximum changes.
    """
    query_rows = queries + tl.minimum(rows, num_vectors - 1).to(tl.int64)[:, None] * size
    features = tl.arange(0, FEATURES)
    q = tl.load(query_rows + features[None, :], mask=(features < size)[None, :], other=0.0)
    return query_rows, q


@triton.jit
def _with_tile(
    top,
    q,
    query_rows,
    documents,
    begin,
    end,
    size,
    CHUNKS: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The largest products so far, and those with a document's vectors from `begin` on."""
    vectors = tl.minimum(begin + tl.arange(0, top.shape[1]), end - 1)
    document_rows = documents + vectors.to(tl.int64)[:, None] * size
    s = _products(q, query_rows, document_rows, size, CHUNKS, FEATURES, PRECISION)
    return _nan_maximum(top, s)


@triton.jit(do_not_specialize=["num_vectors", "num_documents", "a_program"])
def _best_kernel(
    queries,
    documents,
    first_tiles,
    begins,
    ends,
    finished,
    best,
    num_vectors,
    num_documents,
    a_program,
    size,
    CHUNKS: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_query = rows < num_vectors
    query_rows, q = _query_tile(queries, rows, num_vectors, size, FEATURES)
    document = tl.program_id(1) * a_program
    first = tl.load(first_tiles + document)
    last = tl.load(first_tiles + tl.minimum(document + a_program, num_documents))
    top = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)
    for tile in range(first, last):
        begin = tl.load(begins + tile)
        end = tl.load(ends + tile)
        top = _with_tile(
            top, q, query_rows, documents, begin, end, size, CHUNKS, FEATURES, PRECISION
        )
        document = tl.load(finished + tile)
        if document >= 0:
            place = best + (rows.to(tl.int64) + tl.cast(document, tl.int64) * num_vectors)
            tl.store(place, tl.reduce(top, 1, _nan_maximum), mask=is_query)
            top = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)


@triton.jit(do_not_specialize=["num_vectors", "num_documents"])
def _sum_kernel(
    best,
    cu_queries,
    out,
    num_vectors,
    num_documents,
    DOCUMENTS: tl.constexpr,
    VECTORS: tl.constexpr,
):
    query = tl.program_id(0)
    documents = tl.program_id(1) * DOCUMENTS + tl.arange(0, DOCUMENTS)
    is_document = documents < num_documents
    begin = tl.load(cu_queries + query)
    end = tl.load(cu_queries + query + 1)
    total = tl.zeros((DOCUMENTS,), tl.float32)
    rows = best + documents.to(tl.int64)[:, None] * num_vectors
    for at in range(begin, end, VECTORS):
        vectors = at + tl.arange(0, VECTORS)
        mask = is_document[:, None] & (vectors < end)[None, :]
        total += tl.sum(tl.load(rows + vectors[None, :], mask=mask, other=0.0), 1)
    place = out + query.to(tl.int64) * num_documents + documents
    tl.store(place, total, mask=is_document)


@triton.jit(do_not_specialize=["num_vectors"])
def _one_query_kernel(
    query,
    documents,
    cu_documents,
    out,
    num_vectors,
    size,
    divisor,
    empty_score,
    CHUNKS: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_M)
    query_rows, q = _query_tile(query, rows, num_vectors, size, FEATURES)
    document = tl.program_id(0)
    begin = tl.load(cu_documents + document)
    end = tl.load(cu_documents + document + 1)
    top = tl.full((BLOCK_M, BLOCK_N), float("-inf"), tl.float32)
    for at in range(begin, end, BLOCK_N):
        top = _with_tile(top, q, query_rows, documents, at, end, size, CHUNKS, FEATURES, PRECISION)
    best = tl.where(rows < num_vectors, tl.reduce(top, 1, _nan_maximum), 0.0)
    tl.store(out + document, tl.where(begin < end, tl.sum(best, 0) / divisor, empty_score))


class Tiles(NamedTuple):
    """Queries' bounds, and documents cut into tiles, each of one document's vectors.

    int32, on the vectors' device.
    """

    cu_queries: Tensor  # [num_queries + 1]
    first_tiles: Tensor  # [num_documents + 1]: of each document
    begins: Tensor  # [num_tiles]: the first vector
    ends: Tensor  # [num_tiles]: past the last
    finished: Tensor  # [num_tiles]: the document where the tile is its last, else -1


def tiles_of(
    cu_queries: np.ndarray, cu_documents: np.ndarray, dtype: torch.dtype, device: torch.device
) -> Tiles:
    """One upload.  cu_queries, cu_documents: on the host, bounds.  dtype: the vectors'."""
    tile = _tile_vectors(dtype)
    cut = host.maxsim_tiles()
    if cut is None:
        parts = [cu_queries, *_cut(cu_documents, tile)]
        packed = np.concatenate(parts, dtype=np.int32, casting="unsafe")
        sizes = [len(part) for part in parts]
    else:
        bounds = np.ascontiguousarray(cu_documents, dtype=np.int64)
        first, count = len(cu_queries), len(bounds) - 1
        most = count + 1 + 3 * (count + bounds.item(-1) // tile)  # maxsim_tiles_size() in csrc
        packed = np.empty(first + most, dtype=np.int32)
        packed[:first] = cu_queries
        num_tiles = cut(bounds.ctypes.data, count, tile, packed[first:])
        sizes = [first, count + 1, num_tiles, num_tiles, num_tiles]
        packed = packed[: sum(sizes)]
    # The copy is staged before the call returns: the array need not live on.
    uploaded = torch.from_numpy(packed).to(device, non_blocking=True)
    return Tiles(*uploaded.split(sizes))


def _cut(cu_documents: np.ndarray, tile: int) -> tuple[np.ndarray, ...]:
    """Fields of Tiles: first_tiles, begins, ends, finished; 5 times slower than the native core."""
    counts = (np.diff(cu_documents) + (tile - 1)) // tile
    first_tiles = np.zeros(len(cu_documents), dtype=np.int64)
    np.cumsum(counts, out=first_tiles[1:])
    documents = np.repeat(np.arange(len(counts)), counts)
    begins = (cu_documents[:-1] - tile * first_tiles[:-1])[documents]
    begins += np.arange(0, tile * len(begins), tile)
    past, last = begins + tile, cu_documents[1:][documents]
    return first_tiles, begins, np.minimum(past, last), np.where(past >= last, documents, -1)


def maxsim(queries: Tensor, documents: Tensor, tiles: Tiles) -> Tensor:
    """The sum over each query's vectors of the largest product with a document's.

    queries: contiguous [query vectors, size], documents: [document vectors, size], of one dtype.
    tiles: tiles_of() their bounds.
    Returns f32 [num_queries, num_documents], undefined for a document without vectors; needs 4
    bytes a query vector and document.
    """
    num_vectors, size = queries.shape
    num_queries, num_documents = len(tiles.cu_queries) - 1, len(tiles.first_tiles) - 1
    device = queries.device
    out = torch.empty((num_queries, num_documents), dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out
    best = torch.empty((num_documents, num_vectors), dtype=torch.float32, device=device)
    is_f32 = queries.element_size() == 4
    block_m = min(64 if is_f32 else 128, max(16, next_power_of_2(num_vectors)))
    row_tiles = triton.cdiv(num_vectors, block_m)
    wanted = row_tiles * num_documents // (_WAVES * num_multiprocessors(device))
    a_program = max(1, min(_DOCUMENTS, wanted))
    if num_vectors > 0:
        launch(
            _best_kernel,
            (row_tiles, triton.cdiv(num_documents, a_program)),
            queries,
            documents,
            *tiles[1:],
            best,
            num_vectors,
            num_documents,
            a_program,
            size,
            BLOCK_M=block_m,
            **_meta(queries),
        )
    launch(
        _sum_kernel,
        (num_queries, triton.cdiv(num_documents, _SUM_DOCUMENTS)),
        best,
        tiles.cu_queries,
        out,
        num_vectors,
        num_documents,
        DOCUMENTS=_SUM_DOCUMENTS,
        VECTORS=_SUM_VECTORS,
        num_warps=4,
    )
    return out


def maxsim_of_one(
    query: Tensor,
    documents: Tensor,
    cu_documents: Tensor,
    *,
    empty_score: float,
    is_mean: bool = False,
) -> Tensor:
    """The same of one query of 1 to MAX_ONE_QUERY vectors.  cu_documents: int32, bounds.

    empty_score: of a document without vectors.  is_mean: divide by the number of vectors.
    Returns f32 [1, num_documents].
    """
    num_vectors, size = query.shape
    num_documents = cu_documents.shape[0] - 1
    out = torch.empty((1, num_documents), dtype=torch.float32, device=query.device)
    if num_documents == 0:
        return out
    meta, block_m = _meta(query), max(16, next_power_of_2(num_vectors))
    launch(
        _one_query_kernel,
        (num_documents,),
        query,
        documents,
        cu_documents,
        out,
        num_vectors,
        size,
        float(num_vectors if is_mean else 1),
        float(empty_score),
        key=(query.dtype, size, block_m, meta["PRECISION"]),
        BLOCK_M=block_m,
        **meta,
    )
    return out


def _meta(queries: Tensor) -> dict[str, Any]:
    """Constants that both kernels are compiled for, except the rows of a tile."""
    return _meta_of(queries.dtype, queries.shape[1], dot_precision(queries.dtype))


@cache  # 15 us of a call of 150 on a slow host
def _meta_of(dtype: torch.dtype, size: int, precision: str) -> dict[str, Any]:
    features = min(_FEATURES, max(16, next_power_of_2(size)))
    return {
        "CHUNKS": triton.cdiv(size, features),
        "FEATURES": features,
        "PRECISION": precision,
        "BLOCK_N": _tile_vectors(dtype),
        "num_warps": 4,
        "num_stages": 1 if dtype == torch.float32 else 2,
    }


def _tile_vectors(dtype: torch.dtype) -> int:
    return _TILE_F32 if dtype == torch.float32 else _TILE
