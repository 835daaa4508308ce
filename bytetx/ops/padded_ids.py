"""Ids of a padded batch, memory for its packed rows, and the tables that the ids are for."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class PaddedIds:
    """A caller's tensors for a padded batch; the columns of each tensor are contiguous.

    input_ids: int32 or int64 [num_rows, num_columns].
    mask: [num_rows, num_columns] of any dtype but complex, non-zero = token; None: all are tokens.
    token_type_ids, position_ids: int32 or int64 [1 or num_rows, num_columns], or None.
    """

    input_ids: Tensor
    mask: Tensor | None
    token_type_ids: Tensor | None = None
    position_ids: Tensor | None = None

    def with_contiguous_columns(self) -> "PaddedIds":
        """The same, with copies of what has columns apart."""
        others = (self.mask, self.token_type_ids, self.position_ids)
        if all(t is None or t.stride(1) == 1 for t in (self.input_ids, *others)):
            return self
        copies = (None if t is None else t.contiguous() for t in others)
        return PaddedIds(self.input_ids.contiguous(), *copies)


@dataclass(frozen=True, slots=True)
class PackedIds:
    """Where packed rows are written; all int32 and contiguous.

    cu_seqlens: [num_sequences + 1].  input_ids, position_ids: [num_tokens].
    token_type_ids: [num_tokens], or None where the model has none.
    """

    cu_seqlens: Tensor
    input_ids: Tensor
    position_ids: Tensor
    token_type_ids: Tensor | None


@dataclass(frozen=True, slots=True)
class IdTables:
    """How many rows the tables have that ids are looked up in; 0 where there is no table."""

    word: int
    position: int
    token_type: int
