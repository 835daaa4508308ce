"""Result types of tasks that give sparse vectors, or one vector for each token of a text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import torch

from bytetx.encode.request import RunStats
from bytetx.errors import InputError
from bytetx.tasks.call import ListSink
from bytetx.tasks.results import Results

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


@dataclass(frozen=True, slots=True)
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
    rows = [_NO_WEIGHTS if isinstance(vector, InputError) else vector for vector in vectors]
    indptr = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=indptr[1:])
    return SparseEmbeddings(
        np.concatenate([_NO_WEIGHTS.indices, *(row.indices for row in rows)]),
        np.concatenate([_NO_WEIGHTS.values, *(row.values for row in rows)]),
        indptr,
        size,
        stats,
        {i: vector for i, vector in enumerate(vectors) if isinstance(vector, InputError)},
    )


_NO_WEIGHTS = SparseVector(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.float32))
