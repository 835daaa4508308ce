"""ColBERT's scores of packed vectors: products that never leave the chip.

A program holds a tile of query vectors, whatever queries they are of, and goes through documents:
it writes each document's largest product with each vector. A second kernel adds up each query's.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bytetx.ops.triton_kernels.launch import (
    dot_precision,
    launch,
    next_power_of_2,
    num_multiprocessors,
)

_FEATURES = 128  # of a product's part; vectors of more are multiplied in parts
_DOCUMENTS = 16  # that a program goes through, at most
_WAVES = 8
_SUM_DOCUMENTS, _SUM_VECTORS = 64, 32


@triton.jit
def _nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _products(
    q,
    query_rows,
    document_rows,
    is_query,
    is_document,
    size,
    CHUNKS: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Of query vectors and document vectors; q: the former, where all features are in one part."""
    features = tl.arange(0, FEATURES)
    if CHUNKS == 1:
        mask = is_document[:, None] & (features < size)[None, :]
        d = tl.load(document_rows + features[None, :], mask=mask, other=0.0)
        return tl.dot(q, tl.trans(d), input_precision=PRECISION)
    acc = tl.zeros((query_rows.shape[0], document_rows.shape[0]), tl.float32)
    for part in range(CHUNKS):
        at = part * FEATURES + features
        is_feature = (at < size)[None, :]
        a = tl.load(query_rows + at[None, :], mask=is_query[:, None] & is_feature, other=0.0)
        d = tl.load(document_rows + at[None, :], mask=is_document[:, None] & is_feature, other=0.0)
        acc = tl.dot(a, tl.trans(d), acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["num_vectors", "num_documents", "a_program"])
def _best_kernel(
    queries,
    documents,
    cu_documents,
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
    query_rows = queries + rows.to(tl.int64)[:, None] * size
    features = tl.arange(0, FEATURES)
    mask = is_query[:, None] & (features < size)[None, :]
    q = tl.load(query_rows + features[None, :], mask=mask, other=0.0)
    first_document = tl.program_id(1) * a_program
    for document in range(first_document, min(first_document + a_program, num_documents)):
        begin = tl.load(cu_documents + document)
        end = tl.load(cu_documents + document + 1)
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        for at in range(begin, end, BLOCK_N):
            vectors = at + tl.arange(0, BLOCK_N)
            is_document = vectors < end
            document_rows = documents + vectors.to(tl.int64)[:, None] * size
            s = _products(
                q,
                query_rows,
                document_rows,
                is_query,
                is_document,
                size,
                CHUNKS,
                FEATURES,
                PRECISION,
            )
            s = tl.where(is_document[None, :], s, float("-inf"))
            top = _nan_maximum(top, tl.reduce(s, 1, _nan_maximum))
        place = best + (rows.to(tl.int64) + tl.cast(document, tl.int64) * num_vectors)
        tl.store(place, top, mask=is_query)


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


def maxsim(queries: Tensor, cu_queries: Tensor, documents: Tensor, cu_documents: Tensor) -> Tensor:
    """The sum over each query's vectors of the largest product with a document's.

    queries: contiguous [query vectors, size], documents: [document vectors, size], of one dtype.
    cu_queries, cu_documents: int32, the bounds of each.  A document without vectors scores -inf.
    Returns f32 [num_queries, num_documents]; needs 4 bytes a query vector and document.
    """
    num_vectors, size = queries.shape
    num_queries, num_documents = len(cu_queries) - 1, len(cu_documents) - 1
    device = queries.device
    out = torch.empty((num_queries, num_documents), dtype=torch.float32, device=device)
    if out.numel() == 0:
        return out
    best = torch.empty((num_documents, num_vectors), dtype=torch.float32, device=device)
    is_f32 = queries.element_size() == 4
    block_m = min(64 if is_f32 else 128, max(16, next_power_of_2(num_vectors)))
    tiles = triton.cdiv(num_vectors, block_m)
    wanted = tiles * num_documents // (_WAVES * num_multiprocessors(device))
    a_program = max(1, min(_DOCUMENTS, wanted))
    if num_vectors > 0:
        features = min(_FEATURES, max(16, next_power_of_2(size)))
        launch(
            _best_kernel,
            (tiles, triton.cdiv(num_documents, a_program)),
            queries,
            documents,
            cu_documents,
            best,
            num_vectors,
            num_documents,
            a_program,
            size,
            CHUNKS=triton.cdiv(size, features),
            FEATURES=features,
            PRECISION=dot_precision(queries.dtype),
            BLOCK_M=block_m,
            BLOCK_N=32 if is_f32 else 64,
            num_warps=8 if block_m == 128 else 4,
            num_stages=2,
        )
    launch(
        _sum_kernel,
        (num_queries, triton.cdiv(num_documents, _SUM_DOCUMENTS)),
        best,
        cu_queries,
        out,
        num_vectors,
        num_documents,
        DOCUMENTS=_SUM_DOCUMENTS,
        VECTORS=_SUM_VECTORS,
        num_warps=4,
    )
    return out
