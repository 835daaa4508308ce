"""Result types of tasks that give sparse vectors, or one vector for each token of a text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np
import torch

from bytetx.encode.request import RunStats
from bytetx.errors import InputError
from bytetx.tasks.call import ListSink
from bytetx.tasks.results import Results, short_repr

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The weights of one text that are not 0.

    indices: int32 [nnz], token ids, rising.  values: f32 [nnz].
    """

    indices: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        """The number of weights."""
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class PackedSparse(Sequence[SparseVector]):
    """Sparse vectors one after the other, as a step has them; the vectors it gives are copies.

    indices: int32 [nnz].  values: f32 [nnz].  indptr: int64 [num_texts + 1].
    """

    indices: np.ndarray
    values: np.ndarray
    indptr: np.ndarray

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @overload
    def __getitem__(self, index: SupportsIndex) -> SparseVector: ...

    @overload
    def __getitem__(self, index: slice) -> "PackedSparse": ...

    def __getitem__(self, index: "SupportsIndex | slice") -> "SparseVector | PackedSparse":
        if not isinstance(index, slice):
            row = range(len(self))[index]
            some = slice(int(self.indptr[row]), int(self.indptr[row + 1]))
            return SparseVector(self.indices[some].copy(), self.values[some].copy())
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError("consecutive rows alone are views of others")
        indptr = self.indptr[start : max(start, stop) + 1]
        some = slice(int(indptr[0]), int(indptr[-1]))
        return PackedSparse(self.indices[some], self.values[some], indptr - indptr[0])


@dataclass(frozen=True, slots=True, repr=False)
class SparseEmbeddings:
    """Sparse vectors of all texts in the caller's order, as a matrix in CSR.

    Row i has values[indptr[i]:indptr[i + 1]] in columns indices[indptr[i]:indptr[i + 1]].
    indices: int32 [nnz], rising in each row.  values: f32 [nnz].  indptr: int64 [num_texts + 1].
    size: columns, the size of the vocabulary.
    errors: InputError of each text that failed, by its index; its row is empty.
    """

    indices: np.ndarray
    values: np.ndarray
    indptr: np.ndarray
    size: int
    stats: RunStats
    errors: Mapping[int, InputError] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.size

    def __repr__(self) -> str:
        return short_repr(self, shape=self.shape, weights=len(self.values))

    def __len__(self) -> int:
        return len(self.indptr) - 1

    def __getitem__(self, index: SupportsIndex) -> SparseVector:
        row = range(len(self))[index]
        some = slice(int(self.indptr[row]), int(self.indptr[row + 1]))
        return SparseVector(self.indices[some], self.values[some])

    def __iter__(self) -> Iterator[SparseVector]:
        return (self[row] for row in range(len(self)))

    def to_scipy(self) -> "csr_array":
        """A scipy.sparse.csr_array [num_texts, size] that shares this memory."""
        from scipy.sparse import csr_array

        return csr_array((self.values, self.indices, self.indptr), shape=self.shape)

    def to_torch(self) -> torch.Tensor:
        """A sparse CSR tensor [num_texts, size] that shares this memory."""
        return torch.sparse_csr_tensor(
            torch.from_numpy(self.indptr),
            torch.from_numpy(self.indices.astype(np.int64)),
            torch.from_numpy(self.values),
            size=self.shape,
            check_invariants=False,  # they hold
        )


@dataclass(frozen=True, slots=True, repr=False)
class TokenEmbeddings:
    """Vectors of the tokens of all texts, packed in the caller's order.

    Text i has vectors[cu_seqlens[i]:cu_seqlens[i + 1]].
    vectors: [total_vectors, dimensions], f32 or in the precision asked for.
    cu_seqlens: int64 [num_texts + 1].
    errors: InputError of each text that failed, by its index; it has no vectors.
    """

    vectors: np.ndarray
    cu_seqlens: np.ndarray
    stats: RunStats
    errors: Mapping[int, InputError] = field(default_factory=dict)

    def __repr__(self) -> str:
        vectors = self.vectors
        return short_repr(self, texts=len(self), shape=vectors.shape, dtype=vectors.dtype)

    def __len__(self) -> int:
        """The number of texts."""
        return len(self.cu_seqlens) - 1

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        """The vectors of one text: [num_vectors, dimensions]."""
        text = range(len(self))[index]
        return self.vectors[int(self.cu_seqlens[text]) : int(self.cu_seqlens[text + 1])]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[text] for text in range(len(self)))


def join_tokens(
    matrices: Sequence[np.ndarray | InputError], *, empty: np.ndarray, stats: RunStats
) -> TokenEmbeddings:
    """All matrices behind one another.  empty: of no vectors, with their size and dtype."""
    rows = [empty if isinstance(matrix, InputError) else matrix for matrix in matrices]
    cu_seqlens = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=cu_seqlens[1:])
    return TokenEmbeddings(
        np.concatenate([empty, *rows]),
        cu_seqlens,
        stats,
        {i: matrix for i, matrix in enumerate(matrices) if isinstance(matrix, InputError)},
    )


def token_sink(empty: np.ndarray) -> Callable[[int | None], ListSink[TokenEmbeddings]]:
    """The new_sink of calls that give a matrix a text.  empty: as of join_tokens."""

    def gather(results: Results[Any]) -> TokenEmbeddings:
        return join_tokens(results, empty=empty, stats=results.stats)

    return lambda _: ListSink(gather)


def join_sparse(
    vectors: Sequence[SparseVector | InputError], *, size: int, stats: RunStats
) -> SparseEmbeddings:
    """One CSR matrix; a text that failed has an empty row."""
    sink = SparseSink(size)
    for index, vector in enumerate(vectors):
        if isinstance(vector, InputError):
            sink.fail(index, vector)
    good = [i for i, vector in enumerate(vectors) if not isinstance(vector, InputError)]
    sink.put_rows(np.array(good, dtype=np.int64), [vectors[i] for i in good])
    return sink.result(len(vectors), stats)


class SparseSink:
    """Sparse vectors of all texts as one CSR matrix, put together once for all of them."""

    def __init__(self, size: int):
        self._size = size
        self._parts: list[tuple[np.ndarray, PackedSparse]] = []
        self._errors: dict[int, InputError] = {}

    def put_rows(self, indices: np.ndarray, results: Sequence[Any]) -> None:
        if isinstance(results, PackedSparse):  # lent
            columns = results.indices.copy(), results.values.copy()
            self._parts.append((indices, PackedSparse(*columns, results.indptr)))
            return
        indptr = np.zeros(len(results) + 1, dtype=np.int64)
        np.cumsum([len(row) for row in results], out=indptr[1:])
        columns = (
            np.concatenate([np.empty(0, np.int32), *(row.indices for row in results)]),
            np.concatenate([np.empty(0, np.float32), *(row.values for row in results)]),
        )
        self._parts.append((indices, PackedSparse(*columns, indptr)))

    def fail(self, index: int, error: InputError) -> None:
        self._errors[index] = error

    def result(self, num_texts: int, stats: RunStats) -> SparseEmbeddings:
        """A text that failed has an empty row."""
        counts = np.zeros(num_texts, dtype=np.int64)
        for texts, part in self._parts:
            counts[texts] = np.diff(part.indptr)
        indptr = np.zeros(num_texts + 1, dtype=np.int64)
        np.cumsum(counts, out=indptr[1:])
        indices = np.empty(int(indptr[-1]), dtype=np.int32)
        values = np.empty(len(indices), dtype=np.float32)
        for texts, part in self._parts:
            places = np.repeat(indptr[texts] - part.indptr[:-1], np.diff(part.indptr))
            places += np.arange(len(places))
            indices[places], values[places] = part.indices, part.values
        errors = dict(sorted(self._errors.items()))
        return SparseEmbeddings(indices, values, indptr, self._size, stats, errors)
