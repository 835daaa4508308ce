"""Scores of queries and documents by the vectors of their tokens (late interaction)."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from bytetx.ops import native, triton_backend
from bytetx.ops.check import HALF_DTYPES, is_aligned
from bytetx.ops.pooling import pool
from bytetx.ops.registry import Operation

# What the native kernel of one query takes.
_KERNEL_SIZES = (32, 64, 96, 128)
_KERNEL_VECTORS = 64

# Shape class: whether the native kernel of one query takes the operands.
# run(q, cu_queries, d, cu_documents, *, empty_score, product_bytes, is_mean) as of maxsim_scores.
MAXSIM = Operation("maxsim_of_one")


def maxsim_scores(
    queries: Tensor,
    cu_queries: np.ndarray,
    documents: Tensor,
    cu_documents: np.ndarray,
    *,
    empty_score: float,
    product_bytes: int,
    is_mean: bool = False,
) -> Tensor:
    """For each query and document: the sum over the query's vectors of the largest dot product.

    queries: [query vectors, size], documents: [document vectors, size], on one device, floating.
    cu_queries, cu_documents: int64 on the host, the bounds of each query and document.
    empty_score: of a document without vectors.  product_bytes: of products, or of their maxima,
    that are held at once.  is_mean: divide by the number of the query's vectors.
    Half types multiply in f32 on a CPU, and on a GPU as they are with f32 sums.
    Returns f32 [num_queries, num_documents].  Source: ColBERT (arXiv 2004.12832), section 3.2.
    """
    q, d = _operand(queries), _operand(documents)
    if q.dtype != d.dtype:
        q, d = q.float(), d.float()
    takes_one = len(cu_queries) == 2 and _fits_kernel(q, d)
    scores: Tensor = MAXSIM.choose(d.device, takes_one).run(
        q,
        cu_queries,
        d,
        cu_documents,
        empty_score=empty_score,
        product_bytes=product_bytes,
        is_mean=is_mean,
    )
    return scores


def _fits_kernel(q: Tensor, d: Tensor) -> bool:
    return (
        q.dtype in HALF_DTYPES
        and q.shape[1] in _KERNEL_SIZES
        and 0 < q.shape[0] <= _KERNEL_VECTORS
        and q.is_contiguous()
        and d.is_contiguous()
        and is_aligned(q)
        and is_aligned(d)
    )


@MAXSIM.native_kernel("cuda", takes=lambda device, takes_one: takes_one)
def _run_native(
    q: Tensor,
    cu_queries: np.ndarray,
    d: Tensor,
    cu_documents: np.ndarray,
    *,
    empty_score: float,
    product_bytes: int,
    is_mean: bool,
) -> Tensor:
    num_documents = len(cu_documents) - 1
    out = torch.empty((1, num_documents), dtype=torch.float32, device=d.device)
    bounds = np.ascontiguousarray(cu_documents)  # int64, and read before the call returns
    native.require_kernel("maxsim_of_one", d.device)(
        query=q,
        documents=d,
        cu_documents=bounds.ctypes.data,
        scores=out,
        num_vectors=q.shape[0],
        size=q.shape[1],
        num_documents=num_documents,
        divisor=q.shape[0] if is_mean else 1,
        empty_score=empty_score,
        dtype=native.DTYPE_CODES[q.dtype],
        launch=native.launch_args(d.device),
    )
    return out


@MAXSIM.triton_kernel(beside="")
def _run_triton(
    q: Tensor,
    cu_queries: np.ndarray,
    d: Tensor,
    cu_documents: np.ndarray,
    *,
    empty_score: float,
    product_bytes: int,
    is_mean: bool,
) -> Tensor:
    triton, q = triton_backend.kernels(d.device), q.contiguous()
    if len(cu_queries) == 2 and 0 < q.shape[0] <= triton.MAX_ONE_QUERY:
        bounds = _on_device(cu_documents, d.device)
        scores: Tensor = triton.maxsim_of_one(
            q, d.contiguous(), bounds, empty_score=empty_score, is_mean=is_mean
        )
        return scores
    num_documents, blocks = len(cu_documents) - 1, []
    at_once = _documents_at_once(q, product_bytes)
    for first in range(0, max(num_documents, 1), at_once):
        some = slice(first, min(first + at_once, num_documents))
        vectors, ends = _rows(d, cu_documents, some)
        tiles = triton.tiles_of(cu_queries, ends, d.dtype, d.device)
        blocks.append(triton.maxsim(q, vectors.contiguous(), tiles))
    out = blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)
    return _finish(out, cu_queries, cu_documents, empty_score=empty_score, is_mean=is_mean)


@MAXSIM.in_torch()
def _run_torch(
    q: Tensor,
    cu_queries: np.ndarray,
    d: Tensor,
    cu_documents: np.ndarray,
    *,
    empty_score: float,
    product_bytes: int,
    is_mean: bool,
) -> Tensor:
    out = torch.empty((len(cu_queries) - 1, len(cu_documents) - 1), device=d.device)
    for some in cuts(cu_documents, _documents_at_once(q, product_bytes)):
        out[:, some] = _blockwise(q, np.diff(cu_queries), *_rows(d, cu_documents, some))
    return _finish(out, cu_queries, cu_documents, empty_score=empty_score, is_mean=is_mean)


def _documents_at_once(q: Tensor, product_bytes: int) -> int:
    """Documents' vectors, or documents with Triton, whose products or maxima are held at once."""
    return max(1, product_bytes // (4 * max(1, len(q))))


def _finish(
    out: Tensor,
    cu_queries: np.ndarray,
    cu_documents: np.ndarray,
    *,
    empty_score: float,
    is_mean: bool,
) -> Tensor:
    if is_mean:
        seqlens = np.maximum(np.diff(cu_queries), 1)
        out /= torch.from_numpy(seqlens).to(out.device)[:, None]
    is_empty = cu_documents[1:] == cu_documents[:-1]
    if np.count_nonzero(is_empty):
        out.masked_fill_(torch.from_numpy(is_empty).to(out.device), empty_score)
    return out


def cuts(ends: np.ndarray, most: int) -> Iterator[slice]:
    """Texts of at most so many rows together; one of more is alone.  ends: bounds [n + 1]."""
    start, count = 0, len(ends) - 1
    if count > 0 and ends[-1] - ends[0] <= most:
        yield slice(0, count)
        return
    while start < count:
        stop = int(np.searchsorted(ends, ends[start] + most, side="right")) - 1
        yield slice(start, start := min(max(stop, start + 1), count))


def _rows(x: Tensor, ends: np.ndarray, some: slice) -> tuple[Tensor, np.ndarray]:
    """The rows of some texts, and their bounds."""
    own = ends[some.start : some.stop + 1]
    first, last = own.item(0), own.item(-1)
    if first == 0 and last == x.shape[0]:  # all of them, as of most calls
        return x, own
    return x[first:last], own - first


def _blockwise(q: Tensor, seqlens: np.ndarray, documents: Tensor, ends: np.ndarray) -> Tensor:
    """The products, and the maximum of each document's rows."""
    products = _products(documents, q)  # [document vectors, query vectors]
    longest = int(np.diff(ends).max(initial=0))
    best = pool(products, _on_device(ends, q.device), mode="max", max_seqlen=longest)
    return _sums(best.T, seqlens)


def _on_device(ends: np.ndarray, device: torch.device) -> Tensor:
    """int32.  The copy is staged before the call returns: the array need not live on."""
    return torch.from_numpy(ends.astype(np.int32)).to(device, non_blocking=True)


def _operand(x: Tensor) -> Tensor:
    return x if x.is_cuda and x.dtype in HALF_DTYPES else x.float()


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b.T in f32."""
    if a.dtype == torch.float32:
        return a @ b.T
    return torch.mm(a, b.T, out_dtype=torch.float32)


def _sums(x: Tensor, seqlens: np.ndarray) -> Tensor:
    """Sums of consecutive rows of x [total_tokens, n]: [len(seqlens), n]."""
    if len(seqlens) and (seqlens == seqlens[0]).all():
        return x.reshape(len(seqlens), int(seqlens[0]), x.shape[1]).sum(dim=1)
    lengths = torch.from_numpy(seqlens).to(x.device)
    return torch.segment_reduce(x.contiguous(), "sum", lengths=lengths, axis=0, unsafe=True)
