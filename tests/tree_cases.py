"""Attention of batches with a tree, and of the same sequences unshared: the truth of its tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bytetx.ops.attention import varlen_attention
from bytetx.ops.attention_plan import AttentionPlan, plan_attention
from bytetx.sequence_tree import MAX_ANCESTORS, SequenceTree


def make_tree(
    parents: Sequence[int], seqlens: Sequence[int], *, keys_alone: int = 0
) -> SequenceTree:
    """keys_alone: how many sequences, the last ones, have no query rows."""
    num_rows = sum(seqlens[: len(seqlens) - keys_alone])
    return SequenceTree(
        np.array(parents, dtype=np.int32), np.array(seqlens, dtype=np.int32), num_rows
    )


@st.composite
def trees(draw: st.DrawFn, lengths: st.SearchStrategy[int], most: int = 10) -> SequenceTree:
    """Several roots, up to MAX_ANCESTORS ancestors; children before their parents, too."""
    depths: list[int] = []
    parents: list[int] = []
    for i in range(draw(st.integers(1, most))):
        above = [j for j in range(i) if depths[j] < MAX_ANCESTORS]
        parent = draw(st.sampled_from([-1, *above, *above[-1:] * 3]))
        parents.append(parent)
        depths.append(0 if parent < 0 else depths[parent] + 1)
    size = len(parents)
    seqlens = draw(st.lists(lengths, min_size=size, max_size=size))
    order = draw(st.just(list(range(size))) | st.permutations(range(size)))
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    return make_tree(
        [place[parents[old]] for old in order],
        [seqlens[old] for old in order],
        keys_alone=draw(st.integers(0, size - 1)),
    )


def chain(tree: SequenceTree, sequence: int) -> list[int]:
    """The sequence's ancestors, the first of them first, and itself."""
    found = [sequence]
    while tree.parents[found[0]] >= 0:
        found.insert(0, int(tree.parents[found[0]]))
    return found


def rows_of(tree: SequenceTree, sequences: Sequence[int]) -> Tensor:
    """int64: the rows of the sequences, one after the other."""
    return torch.cat([torch.arange(*tree.starts[i : i + 2].tolist()) for i in sequences])


@dataclass(frozen=True)
class TreeCase:
    """Operands of one call; q, k and v are views into one packed buffer, as in a model."""

    tree: SequenceTree
    q: Tensor  # [tree.num_rows, num_heads, head_dim]
    k: Tensor  # [tree.total_keys, num_kv_heads, head_dim]
    v: Tensor

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.from_numpy(self.tree.starts).int().to(self.q.device)

    @property
    def max_seqlen(self) -> int:
        return int((self.tree.prefix_lens + self.tree.seqlens).max())

    @property
    def sequences(self) -> list[int]:
        """Those that have query rows."""
        starts, seqlens = self.tree.starts, self.tree.seqlens
        return [i for i in range(len(seqlens)) if seqlens[i] and starts[i] < self.tree.num_rows]

    def plan(self, **options: object) -> AttentionPlan:
        sizes = {"total_tokens": len(self.q), "head_dim": self.q.shape[2]}
        plan = plan_attention(self.cu_seqlens, **sizes, causal=True, tree=self.tree, **options)
        assert plan is not None
        return plan

    def run(self, *, batch_invariant: bool = False, **options: object) -> Tensor:
        plan = self.plan(batch_invariant=batch_invariant, **options)
        out = torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=self.q.device)
        operands = (self.q, self.k, self.v, self.cu_seqlens)
        sizes = {"max_seqlen": self.max_seqlen, "plan": plan, "out": out}
        return varlen_attention(*operands, **sizes, causal=True, **options)

    def unshared(self) -> tuple["TreeCase", Tensor]:
        """Every sequence with query rows behind its ancestors, whose queries are new; and the rows
        of its own there, in order."""
        chains = [rows_of(self.tree, chain(self.tree, i)) for i in self.sequences]
        own = [torch.arange(n) for n in self.tree.seqlens[self.sequences].tolist()]
        ends = np.cumsum([len(rows) for rows in chains])
        places = torch.cat(
            [int(end) - len(rows) + rows for end, rows in zip(ends, own, strict=True)]
        )
        rows = torch.cat(chains).to(self.q.device)
        q = torch.randn(len(rows), *self.q.shape[1:]).to(self.q)
        q[places] = self.q
        tree = make_tree([-1] * len(chains), [len(rows) for rows in chains])
        return TreeCase(tree, q, self.k[rows], self.v[rows]), places

    def run_unshared(self, *, batch_invariant: bool = False, **options: object) -> Tensor:
        """The rows that run gives, from attention without a tree."""
        whole, places = self.unshared()
        sizes = {"total_tokens": len(whole.q), "head_dim": whole.q.shape[2], "causal": True}
        invariant = {"batch_invariant": batch_invariant}
        plan = plan_attention(whole.cu_seqlens, **sizes, **invariant, **options)
        operands = (whole.q, whole.k, whole.v, whole.cu_seqlens)
        sizes = {"max_seqlen": whole.max_seqlen, "plan": plan}
        return varlen_attention(*operands, **sizes, causal=True, **options)[places]

    def attend(self, dtype: torch.dtype, *, window: int = 0, softcap: float = 0.0) -> Tensor:
        """The definition, sequence by sequence, in `dtype`; returned in float64."""
        group = self.q.shape[1] // self.k.shape[1]
        out = [torch.empty(0, *self.q.shape[1:], device=self.q.device).double()]
        for i in self.sequences:
            rows = rows_of(self.tree, chain(self.tree, i)).to(self.q.device)
            q = self.q[rows_of(self.tree, [i])].transpose(0, 1).to(dtype)
            k, v = (t[rows].repeat_interleave(group, 1) for t in (self.k, self.v))
            k, v = (t.transpose(0, 1).to(dtype) for t in (k, v))
            at = torch.arange(len(rows), device=self.q.device)
            distance = at - at[len(rows) - q.shape[1] :, None]
            is_seen = distance <= 0
            if window:
                is_seen &= distance > -window
            if softcap:
                scores = softcap * torch.tanh(q @ k.transpose(1, 2) * q.shape[2] ** -0.5 / softcap)
                attended = scores.masked_fill(~is_seen, -torch.inf).softmax(-1) @ v
            else:
                attended = scaled_dot_product_attention(q, k, v, attn_mask=is_seen)
            out.append(attended.transpose(0, 1).double())
        return torch.cat(out)

    def poisoned(self, sequence: int, value: float) -> tuple["TreeCase", Tensor]:
        """The case with such keys and values of a sequence; bool [num_rows]: rows that see it."""
        k, v = self.k.clone(), self.v.clone()
        rows = rows_of(self.tree, [sequence]).to(k.device)
        k[rows], v[rows] = value, value
        sees = torch.zeros(len(self.q), dtype=torch.bool)
        for i in self.sequences:
            if sequence in chain(self.tree, i):
                sees[rows_of(self.tree, [i])] = True
        return TreeCase(self.tree, self.q, k, v), sees.to(k.device)


def make_case(
    tree: SequenceTree,
    *,
    dtype: torch.dtype = torch.float32,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    device: str = "cpu",
) -> TreeCase:
    heads = num_heads + 2 * num_kv_heads
    packed = torch.randn(tree.total_keys, heads, head_dim, device=device).to(dtype)
    q, k, v = packed.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return TreeCase(tree, q[: tree.num_rows], k, v)


def assert_as_exact_as_torch(ours: Tensor, case: TreeCase, **options: object) -> None:
    """At most twice the error of torch in the same dtype, and the rounding of the result."""
    exact = case.attend(torch.float64, **options)
    theirs = case.attend(case.q.dtype, **options) - exact
    error = ours.double() - exact
    assert ours.isfinite().all()
    rounding = torch.finfo(case.q.dtype).eps * exact.abs()
    assert error.norm() <= 2 * theirs.norm() + rounding.norm()
    if len(error):
        assert error.abs().max() <= 2 * theirs.abs().max() + rounding.max()
