"""Scores between vectors, and the best of a corpus for each query, block by block."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional as F

from bytetx.arguments import check_top_k
from bytetx.errors import OptionError, shown
from bytetx.ops.maxsim import cuts, maxsim_scores
from bytetx.tasks.results import Embeddings, short_repr
from bytetx.tasks.vectors import SparseEmbeddings, TokenEmbeddings

Similarity = Literal["cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim"]
Matrix = npt.NDArray[np.floating] | torch.Tensor
# A matrix with a row for each text, or packed rows of tokens with the bounds of each text.
Vectors = Matrix | Embeddings | SparseEmbeddings
Packed = TokenEmbeddings | tuple[Matrix, npt.ArrayLike | torch.Tensor] | Sequence[Matrix]

SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan", "maxsim", "meanmaxsim")
_OF_TOKENS = ("maxsim", "meanmaxsim")

# Scores of rows that are held at once: 1024 queries by 16 384 rows of a corpus are 64 MiB.
_QUERY_ROWS, _CORPUS_ROWS = 1024, 16384
# A block of sparse queries is dense: 128 MiB are 1099 rows of BERT's vocabulary.
_DENSE_BYTES = 1 << 27
# Products of token vectors that are held at once, _QUERY_TOKENS by so many document tokens. They
# fit a CPU's cache until their maximum is taken: on two cores, 32 queries of 32 tokens against 3000
# documents take 2.1 s so, 3.3 s with 8 MiB and 7 s with 1 MiB. On a GPU each block costs the host
# more than the cache saves: 1024 query tokens against 507k of documents take an H200 9.4 ms in
# blocks of 32 MiB, 2.6 ms in blocks of 256 MiB and 1.8 ms in these.
_PRODUCT_BYTES = {"cpu": 1 << 25, "cuda": 1 << 29}
_QUERY_TOKENS = {"cpu": 512, "cuda": 1024}
_CORPUS_TOKENS = {"cpu": 1 << 18, "cuda": 1 << 20}
# Of a document without a vector: below every other, as sentence-transformers has it.
_NO_VECTORS_SCORE = -1e9


@dataclass(frozen=True, slots=True)
class Match:
    """A row of the corpus and its score for a query."""

    index: int
    score: float


@dataclass(frozen=True, slots=True, repr=False)
class SearchResults:
    """The best rows of a corpus for each query, best first.

    indices: int64 [num_queries, k].  scores: f32 [num_queries, k].
    """

    indices: np.ndarray
    scores: np.ndarray

    def __repr__(self) -> str:
        return short_repr(self, queries=len(self), top_k=self.indices.shape[1])

    def __len__(self) -> int:
        """The number of queries."""
        return len(self.indices)

    def __getitem__(self, query: int) -> list[Match]:
        pairs = zip(self.indices[query].tolist(), self.scores[query].tolist(), strict=True)
        return [Match(index, score) for index, score in pairs]

    def __iter__(self) -> Iterator[list[Match]]:
        return (self[query] for query in range(len(self)))


def similarity(
    a: Vectors | Packed,
    b: Vectors | Packed,
    *,
    function: Similarity = "cosine",
    device: str | torch.device | None = None,
) -> torch.Tensor:
    """The score of every row of a with every row of b.

    a, b: [n, dimensions] each, float arrays, tensors, Embeddings or SparseEmbeddings.
    function: cosine, dot, or the negative distance that euclidean and manhattan name; maxsim and
    meanmaxsim take vectors of tokens, as bytetx.maxsim does.
    device: where the scores are computed; None is b's.
    Returns f32 [len(a), len(b)] on b's device. Raises OptionError for what does not fit together.
    """
    queries, corpus, place = _collections(a, b, function, device)
    shape = len(queries), len(corpus)
    out = None
    failed = _failed(a), _failed(b)
    for rows, columns, scores in _score_blocks(queries, corpus, function, place, failed):
        if scores.shape == shape:
            return scores.to(corpus.device, torch.float32)
        if out is None:
            out = torch.empty(shape, device=corpus.device)
        out[rows, columns] = scores.to(out.device)
    return torch.empty(shape, device=corpus.device) if out is None else out


def maxsim(
    queries: Packed,
    documents: Packed,
    *,
    mean: bool = False,
    device: str | torch.device | None = None,
) -> torch.Tensor:
    """For each query and document: the sum over the query's vectors of the largest dot product.

    queries, documents: TokenEmbeddings, a list of matrices [num_vectors, dimensions], or a pair of
    packed vectors [total_vectors, dimensions] and cu_seqlens [n + 1].  mean: divide by the number
    of the query's vectors.  device: where the scores are computed; None is that of the documents.
    A document without vectors has the score -1e9, a query without them 0. Half types multiply in
    f32 on a CPU, and on a GPU as they are with f32 sums.
    Returns f32 [num_queries, num_documents] on the documents' device; no padded tensor is made.
    Source: ColBERT (arXiv 2004.12832), section 3.2.
    """
    function: Similarity = "meanmaxsim" if mean else "maxsim"
    return similarity(queries, documents, function=function, device=device)


def semantic_search(
    queries: Vectors | Packed,
    corpus: Vectors | Packed,
    *,
    top_k: int = 10,
    function: Similarity = "cosine",
    device: str | torch.device | None = None,
) -> SearchResults:
    """The top_k rows of the corpus for each query, best first.

    The arguments are those of `similarity`. Only the scores of a block of queries with a block of
    the corpus exist at any time. A row of NaN, and one of a text that failed, comes last.
    """
    check_top_k(top_k, may_be_none=False)
    given, rows, place = _collections(queries, corpus, function, device)
    failed = _failed(queries), _failed(corpus)
    k = min(top_k, len(rows))
    best = torch.full((len(given), k), -torch.inf, device=place)
    indices = torch.zeros((len(given), k), dtype=torch.int64, device=place)
    for some, columns, scores in _score_blocks(given, rows, function, place, failed):
        found = min(columns.start, k)  # so many of each query are there
        scores = scores.nan_to_num(nan=-torch.inf)
        values, places = scores.topk(min(k, scores.shape[1]), dim=1)
        values = torch.cat([best[some, :found], values], dim=1)
        both = torch.cat([indices[some, :found], places + columns.start], dim=1)
        values, chosen = values.topk(min(k, values.shape[1]), dim=1)
        best[some, : values.shape[1]] = values
        indices[some, : values.shape[1]] = both.gather(1, chosen)
    return SearchResults(indices.cpu().numpy(), best.cpu().numpy())


@dataclass(frozen=True, slots=True)
class _DenseVectors:
    x: torch.Tensor  # [n, dimensions]

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def size(self) -> int:
        return self.x.shape[1]

    def __len__(self) -> int:
        return len(self.x)

    def blocks(self, device: torch.device, *, is_query: bool) -> Iterator[slice]:
        return _cuts(len(self), _QUERY_ROWS if is_query else _CORPUS_ROWS)

    def take(self, rows: slice, device: torch.device) -> torch.Tensor:
        return self.x[rows].to(device).float()


@dataclass(frozen=True, slots=True)
class _Sparse:
    x: SparseEmbeddings

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def size(self) -> int:
        return self.x.size

    def __len__(self) -> int:
        return len(self.x)

    def blocks(self, device: torch.device, *, is_query: bool) -> Iterator[slice]:
        dense_rows = max(1, min(_QUERY_ROWS, _DENSE_BYTES // (4 * self.size)))
        return _cuts(len(self), dense_rows if is_query else _CORPUS_ROWS)

    def take(self, rows: slice, device: torch.device) -> torch.Tensor:
        """Sparse CSR [n, size]."""
        indptr = self.x.indptr[rows.start : rows.stop + 1]
        some = slice(int(indptr[0]), int(indptr[-1]))
        return torch.sparse_csr_tensor(
            torch.from_numpy(indptr - indptr[0]),
            torch.from_numpy(self.x.indices[some].astype(np.int64)),
            torch.from_numpy(self.x.values[some].copy()),
            size=(rows.stop - rows.start, self.size),
            device=device,
            check_invariants=False,  # they hold
        )


@dataclass(frozen=True, slots=True)
class _TokenRows:
    """Packed rows of tokens. cu_seqlens: int64 [n + 1], on the host."""

    x: torch.Tensor  # [total_vectors, dimensions]
    cu_seqlens: np.ndarray

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def size(self) -> int:
        return self.x.shape[1]

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    def blocks(self, device: torch.device, *, is_query: bool) -> Iterator[slice]:
        num_tokens = _QUERY_TOKENS if is_query else _CORPUS_TOKENS
        return cuts(self.cu_seqlens, num_tokens[device.type])

    def take(self, texts: slice, device: torch.device) -> "_TokenRows":
        if texts.stop - texts.start == len(self) and self.x.device == device:
            return self
        bounds = self.cu_seqlens[texts.start : texts.stop + 1]
        return _TokenRows(self.x[int(bounds[0]) : int(bounds[-1])].to(device), bounds - bounds[0])


def _cuts(num_rows: int, step: int) -> Iterator[slice]:
    return (slice(row, min(row + step, num_rows)) for row in range(0, num_rows, step))


def _collections(
    a: Vectors | Packed, b: Vectors | Packed, function: str, device: str | torch.device | None
) -> tuple[
    "_DenseVectors | _Sparse | _TokenRows", "_DenseVectors | _Sparse | _TokenRows", torch.device
]:
    """Both sides, and the device of the scores."""
    if function not in SIMILARITIES:
        known = ", ".join(SIMILARITIES)
        raise OptionError(f"function must be one of {known}, got {shown(function)}")
    make = _tokens if function in _OF_TOKENS else _rows
    left, right = make("the first vectors", a), make("the second vectors", b)
    if left.size != right.size and len(left) and len(right):
        raise OptionError(f"both sides need vectors of one size, got {left.size} and {right.size}")
    if isinstance(left, _Sparse) != isinstance(right, _Sparse):
        raise OptionError("sparse vectors are compared with sparse ones; one side is dense")
    if isinstance(left, _Sparse) and function == "manhattan":
        raise OptionError("function manhattan is not for sparse vectors; use dot or cosine")
    return left, right, right.device if device is None else torch.device(device)


def _rows(name: str, given: object) -> "_DenseVectors | _Sparse":
    if isinstance(given, SparseEmbeddings):
        return _Sparse(given)
    if isinstance(given, TokenEmbeddings):
        raise OptionError(f"{name} are of tokens; use function maxsim, or bytetx.maxsim")
    x = _tensor(name, given.vectors if isinstance(given, Embeddings) else given)
    if x.dim() == 1:  # one vector; without a number there is none
        x = x[None] if len(x) else x.reshape(0, 0)
    if x.dim() != 2:
        raise OptionError(f"{name} must be [n, dimensions], got shape {tuple(x.shape)}")
    return _DenseVectors(x)


def _tokens(name: str, given: object) -> _TokenRows:
    if isinstance(given, TokenEmbeddings):
        return _TokenRows(_tensor(name, given.vectors), given.cu_seqlens)
    if isinstance(given, tuple) and len(given) == 2 and np.ndim(given[1]) == 1:
        x = _tensor(name, given[0])
        bounds = given[1].cpu().numpy() if isinstance(given[1], torch.Tensor) else given[1]
        cu_seqlens = np.asarray(bounds, dtype=np.int64)
        is_whole = (
            len(cu_seqlens) > 0 and cu_seqlens.item(0) == 0 and cu_seqlens.item(-1) == x.shape[0]
        )
        if x.dim() != 2 or not is_whole or np.count_nonzero(cu_seqlens[1:] < cu_seqlens[:-1]):
            raise OptionError(
                f"{name}: cu_seqlens must rise from 0 to the rows of [total_vectors, dimensions], "
                f"got {cu_seqlens[:1]} to {cu_seqlens[-1:]} for shape {tuple(x.shape)}"
            )
        return _TokenRows(x, cu_seqlens)
    if not isinstance(given, Sequence):
        raise OptionError(
            f"{name} must be TokenEmbeddings, a list of matrices, or (vectors, cu_seqlens), got "
            f"{type(given).__name__}"
        )
    matrices = [_tensor(name, matrix) for matrix in given]
    sizes = {matrix.shape[1:] for matrix in matrices}
    if len(sizes) > 1 or any(matrix.dim() != 2 for matrix in matrices):
        raise OptionError(f"{name} must be matrices [num_vectors, dimensions] of one size")
    cu_seqlens = np.cumsum([0, *map(len, matrices)], dtype=np.int64)
    return _TokenRows(torch.cat(matrices) if matrices else torch.empty((0, 0)), cu_seqlens)


def _tensor(name: str, given: object) -> torch.Tensor:
    if isinstance(given, np.ndarray | list | tuple):
        try:
            array = given if isinstance(given, np.ndarray) else np.asarray(given, dtype=np.float32)
            native = array.dtype.newbyteorder("=")  # torch has no other
            given = torch.from_numpy(np.ascontiguousarray(array, dtype=native))
        except (TypeError, ValueError, OverflowError) as error:
            raise OptionError(f"{name} must be floating numbers: {error}") from error
    if not isinstance(given, torch.Tensor) or not given.is_floating_point():
        kind = given.dtype if isinstance(given, torch.Tensor) else type(given).__name__
        raise OptionError(f"{name} must be floating numbers, got {kind}")
    # What is computed from them needs no no_grad, which takes 25 us of a GPU's host.
    return given.detach() if given.requires_grad else given


def _failed(given: object) -> np.ndarray:
    """int64: the texts of a result of bytetx that have none, rising."""
    failed: list[int] = []
    if isinstance(given, Embeddings | SparseEmbeddings | TokenEmbeddings):
        failed = sorted(given.errors)
    return np.array(failed, dtype=np.int64)


def _score_blocks(
    queries: "_DenseVectors | _Sparse | _TokenRows",
    corpus: "_DenseVectors | _Sparse | _TokenRows",
    function: str,
    device: torch.device,
    failed: tuple[np.ndarray, np.ndarray],
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """(queries, rows of the corpus, their scores f32); NaN for a text that failed.

    failed: of the queries, and of the corpus.
    """
    for rows, columns, scores in _every_score(queries, corpus, function, device):
        for axis, (some, texts) in enumerate(zip((rows, columns), failed, strict=True)):
            inside = texts[(texts >= some.start) & (texts < some.stop)] - some.start
            if len(inside):
                where = torch.from_numpy(inside).to(scores.device)
                scores = scores.index_fill(axis, where, torch.nan)
        yield rows, columns, scores


def _every_score(
    queries: "_DenseVectors | _Sparse | _TokenRows",
    corpus: "_DenseVectors | _Sparse | _TokenRows",
    function: str,
    device: torch.device,
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """(queries, rows of the corpus, their scores f32), each row of the corpus read once."""
    if isinstance(queries, _TokenRows) and isinstance(corpus, _TokenRows):
        for columns in corpus.blocks(device, is_query=False):
            documents = corpus.take(columns, device)
            for rows in queries.blocks(device, is_query=True):
                block = queries.take(rows, device)
                scores = maxsim_scores(
                    *(block.x, block.cu_seqlens, documents.x, documents.cu_seqlens),
                    empty_score=_NO_VECTORS_SCORE,
                    product_bytes=_PRODUCT_BYTES[device.type],
                    is_mean=function == "meanmaxsim",
                )
                yield rows, columns, scores
        return
    assert not isinstance(queries, _TokenRows) and not isinstance(corpus, _TokenRows)
    for columns in corpus.blocks(device, is_query=False):
        b = _prepared(corpus.take(columns, device), function)
        for rows in queries.blocks(device, is_query=True):
            a = _prepared(queries.take(rows, device), function)
            yield rows, columns, _scores(a, b, function)


def _prepared(x: torch.Tensor, function: str) -> torch.Tensor:
    """Scale rows to unit length for cosine."""
    if function != "cosine":
        return x
    if x.layout is not torch.sparse_csr:
        return F.normalize(x, dim=1)
    norms = _squares(x).sqrt().clamp(min=1e-12).repeat_interleave(x.crow_indices().diff())
    return torch.sparse_csr_tensor(
        x.crow_indices(), x.col_indices(), x.values() / norms, size=x.shape, check_invariants=False
    )


def _squares(x: torch.Tensor) -> torch.Tensor:
    """The square of each sparse row's length."""
    row = torch.repeat_interleave(
        torch.arange(x.shape[0], device=x.device), x.crow_indices().diff()
    )
    return x.values().new_zeros(x.shape[0]).index_add_(0, row, x.values().square())


def _scores(a: torch.Tensor, b: torch.Tensor, function: str) -> torch.Tensor:
    if b.layout is torch.sparse_csr:
        products = (b @ a.to_dense().T).T
        if function != "euclidean":
            return products
        squares = _squares(a)[:, None] + _squares(b)[None] - 2 * products
        return -squares.clamp(min=0).sqrt()
    if function in ("cosine", "dot"):
        return a @ b.T
    return -torch.cdist(a, b, p=2.0 if function == "euclidean" else 1.0)
