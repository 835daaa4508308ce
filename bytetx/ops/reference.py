"""Every op in plain torch, fp32 inside: the definition, the oracle, the path without kernels."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bytetx.ops.kv_codes import quantize_kv, restore_kv
from bytetx.ops.padded_ids import IdTables, PackedIds, PaddedIds
from bytetx.sequence_tree import SequenceTree

# Elements of one materialised bias block, [num_heads, rows, seqlen] in f32: 64 MiB whatever the
# lengths are, and one block for every sequence that a model with 512 positions can have.
_MAX_BIAS_ELEMENTS = 1 << 24


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    max_seqlen: int,
    softmax_scale: float,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    relative_bias: Tensor | None = None,
    bias_positions: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(q k^T * softmax_scale + bias) v within each sequence, one run of sequences at a time.

    q: [total_tokens, num_heads, head_dim].  k, v: [total_tokens, num_kv_heads, head_dim].
    cu_seqlens: int32 [batch_size + 1].  causal, window, softcap: see
    ops.attention.varlen_attention.
    relative_bias: f32 [num_heads, 2 * span - 1]; bias_positions: int32 [total_tokens] or None.
    sinks: f32 [num_heads] or None.
    Returns contiguous [total_tokens, num_heads, head_dim] in q's dtype.  Reads cu_seqlens on the
    host (one synchronisation on CUDA).  Nothing of size [batch_size, max_seqlen] is allocated.
    """
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != q.shape[0] or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens must rise from 0 to total_tokens {q.shape[0]}, got {bounds}")
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for start, count, seqlen in _runs(bounds, merge=bias_positions is None):
        rows = slice(start, start + count * seqlen)
        qs, ks, vs = (
            t[rows].unflatten(0, (count, seqlen)).transpose(1, 2).float() for t in (q, k, v)
        )  # [count, num_heads, seqlen, head_dim]
        positions = (
            torch.arange(seqlen, device=q.device)
            if bias_positions is None
            else bias_positions[rows]
        )
        mask = _Mask(causal, window, relative_bias, positions)
        attended = _attend(qs, ks, vs, softmax_scale, mask, softcap, sinks)
        out[rows] = attended.transpose(1, 2).flatten(0, 1)
    return out


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree: SequenceTree,
    *,
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    **_: object,
) -> Tensor:
    """Causal attention of each sequence over its ancestors and itself, one sequence at a time.

    q: [tree.num_rows, num_heads, head_dim].  k, v: [tree.total_keys, num_kv_heads, head_dim].
    window, softcap: see ops.attention.varlen_attention.
    """
    group = q.shape[1] // k.shape[1]
    rows, cu_keys = tree.key_rows()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for first, last, begin, end in zip(
        tree.starts, tree.starts[1:], cu_keys, cu_keys[1:], strict=False
    ):
        if first == last or begin == end:
            continue
        keys = torch.from_numpy(rows[begin:end]).to(q.device)
        qs = q[first:last].transpose(0, 1).float()  # [num_heads, rows, head_dim]
        ks, vs = (t[keys].repeat_interleave(group, dim=1).transpose(0, 1).float() for t in (k, v))
        mask = _Mask(True, window, None, torch.arange(len(keys), device=q.device))
        seen = mask.rows(len(keys) - int(last - first), len(keys))
        attended = _attend_masked(qs, ks, vs, seen, softmax_scale=softmax_scale, softcap=softcap)
        out[first:last] = attended.transpose(0, 1)
    return out


def disentangled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos_k: Tensor | None,
    pos_q: Tensor | None,
    buckets: Tensor,
    cu_seqlens: Tensor,
    *,
    softmax_scale: float,
) -> Tensor:
    """See ops.disentangled.disentangled_attention; one run of sequences at a time.

    Reads cu_seqlens on the host (one synchronisation on CUDA).  Rows past its end are zeros.
    """
    bounds, center = cu_seqlens.tolist(), len(buckets) // 2
    if bounds[0] != 0 or bounds[-1] > q.shape[0] or sorted(bounds) != bounds:
        raise ValueError(f"cu_seqlens must rise from 0 to total_tokens {q.shape[0]}, got {bounds}")
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for start, count, seqlen in _runs(bounds, merge=True):
        rows = slice(start, start + count * seqlen)
        qs, ks, vs = (
            t[rows].unflatten(0, (count, seqlen)).transpose(1, 2).float() for t in (q, k, v)
        )  # [count, num_heads, seqlen, head_dim]
        at = torch.arange(seqlen, device=q.device)
        index = buckets[at[:, None] - at + center].long().expand(*qs.shape[:2], -1, -1)
        scores = qs @ ks.transpose(2, 3)
        if pos_k is not None:
            scores = scores + (qs @ pos_k.float().permute(1, 2, 0)).gather(3, index)
        if pos_q is not None:  # for query i, key j scores with the bucket of i - j
            of_keys = (ks @ pos_q.float().permute(1, 2, 0)).gather(3, index.transpose(2, 3))
            scores = scores + of_keys.transpose(2, 3)
        attended = torch.softmax(scores * softmax_scale, dim=-1) @ vs
        out[rows] = attended.transpose(1, 2).flatten(0, 1).to(q.dtype)
    return out


def _runs(cu_seqlens: list[int], *, merge: bool) -> Iterator[tuple[int, int, int]]:
    """(first row, number of sequences, their length) of each run of equal, non-zero lengths.

    Neighbours of one length are a plain [count, seqlen] view of the packed rows.
    """
    start, count, seqlen = 0, 0, 0
    for first, last in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        if last == first:
            continue
        if merge and count and last - first == seqlen:
            count += 1
            continue
        if count:
            yield start, count, seqlen
        start, count, seqlen = first, 1, last - first
    if count:
        yield start, count, seqlen


@dataclass(frozen=True, slots=True)
class _Mask:
    """The mask and bias that are added to the scores of one sequence."""

    causal: bool
    window: int
    relative_bias: Tensor | None  # f32 [num_heads, 2 * span - 1]
    positions: Tensor  # int [seqlen]

    def rows(self, first: int, last: int) -> Tensor:
        """f32 [num_heads or 1, last - first, seqlen], for query rows first .. last - 1."""
        index = torch.arange(self.positions.shape[0], device=self.positions.device)
        distance = index[None, :] - index[first:last, None]
        if self.relative_bias is None:
            mask = torch.zeros((1, *distance.shape), device=distance.device)
        else:
            span = (self.relative_bias.shape[1] + 1) // 2
            moved = self.positions[None, :] - self.positions[first:last, None] + (span - 1)
            mask = self.relative_bias.float()[:, moved.long()]
        if self.causal:
            mask = mask.masked_fill(distance > 0, -torch.inf)
        if self.window:
            mask = mask.masked_fill(distance.abs() >= self.window, -torch.inf)
        return mask


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    mask: _Mask,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of [count, num_heads, seqlen, head_dim] operands."""
    is_plain = mask.relative_bias is None and not mask.window
    if is_plain and not softcap and sinks is None:
        return F.scaled_dot_product_attention(q, k, v, scale=softmax_scale, is_causal=mask.causal)
    count, num_heads, seqlen = q.shape[:3]
    num_blocks = num_heads * seqlen * (count if softcap or sinks is not None else 1)
    block_rows = max(1, _MAX_BIAS_ELEMENTS // num_blocks)
    blocks = [
        _attend_masked(
            q[:, :, first : first + block_rows],
            k,
            v,
            mask.rows(first, min(first + block_rows, seqlen)),
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
        )
        for first in range(0, seqlen, block_rows)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=2)


def _attend_masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    softmax_scale: float,
    softcap: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """q, k, v: f32 [..., rows, head_dim].  mask: added to the scores, f32 [num_heads or 1, ...]."""
    if not softcap and sinks is None:
        mask = mask[None] if q.dim() == 4 else mask
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=softmax_scale)
    scores = (q @ k.transpose(-1, -2)).mul_(softmax_scale / (softcap or 1.0))
    if softcap:
        scores.tanh_().mul_(softcap)
    scores.add_(mask)
    if sinks is None:
        return torch.softmax(scores, dim=-1) @ v
    sink = sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[..., :-1] @ v


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cu_seqlens: Tensor,
    page_table: Tensor,
    kv_seqlens: Tensor,
    softmax_scale: float,
    window: int = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """Causal attention against keys in pages, one sequence at a time; see ops.paged.

    Reads only keys that a row of this step sees.  Reads lengths on the host (a synchronisation on
    CUDA).  Returns contiguous [total_tokens, num_heads, head_dim] in q's dtype.
    """
    page_size, num_slots = k_cache.shape[1], k_cache.shape[0] * k_cache.shape[1]
    group = q.shape[1] // k_cache.shape[2]
    bounds, num_keys = cu_seqlens.tolist(), kv_seqlens.tolist()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for i, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        first_query = num_keys[i] - (end - start)
        if first_query < 0:
            raise ValueError(
                f"kv_seqlens[{i}] must count this step's {end - start} tokens, got {num_keys[i]}"
            )
        if end == start:
            continue
        first = max(0, first_query - window + 1) if window else 0
        at = torch.arange(first, num_keys[i], device=q.device)
        slots = page_table[i, at // page_size].long() * page_size + at % page_size
        if not q.is_cuda and not 0 <= int(slots.min()) <= int(slots.max()) < num_slots:
            raise ValueError(f"page_table[{i}] must name pages below {k_cache.shape[0]}")
        k, v = (
            _rows_of(cache, scales, slots).repeat_interleave(group, dim=1).transpose(0, 1)
            for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
        )  # [num_heads, keys, head_dim]
        distance = at[None, :] - torch.arange(first_query, num_keys[i], device=q.device)[:, None]
        is_hidden = (distance > 0) | (distance <= -window) if window else distance > 0
        mask = torch.zeros((1, *distance.shape), device=q.device)
        if alibi_slopes is not None:
            mask = alibi_slopes[:, None, None] * distance
        mask = mask.masked_fill(is_hidden, -torch.inf)
        rows = q[start:end].float().transpose(0, 1)
        attended = _attend_masked(rows, k, v, mask, softmax_scale=softmax_scale, softcap=softcap)
        out[start:end] = attended.transpose(0, 1)
    return out


def _rows_of(cache: Tensor, scales: Tensor | None, slots: Tensor) -> Tensor:
    """f32 [slots, num_kv_heads, head_dim] of pages, of codes where there are scales."""
    rows = cache.flatten(0, 1)[slots]
    if scales is None:
        return rows.float()
    return restore_kv(rows, scales.transpose(1, 2).flatten(0, 1)[slots])


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Rows of k and v into their slots; synchronises on CUDA to skip those of slot -1."""
    is_kept = slot_mapping >= 0
    slots = slot_mapping[is_kept].long()
    page_size = k_cache.shape[1]
    for rows, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
        kept = rows[is_kept]
        if scales is not None:
            kept, kept_scales = quantize_kv(kept)
            scales[slots // page_size, :, slots % page_size] = kept_scales
        cache.view(-1, *rows.shape[1:])[slots] = kept


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor, *, is_interleaved: bool
) -> None:
    """Turns pairs of x's first 2 * cos.shape[1] features by their position's angles, in place."""
    width = 2 * cos.shape[1]
    pairs = x[..., :width].unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    a, b = pairs.float().unbind(-1 if is_interleaved else -2)
    turn_cos, turn_sin = (F.embedding(position_ids, t)[:, None] for t in (cos, sin))
    turned = (a * turn_cos - b * turn_sin, b * turn_cos + a * turn_sin)
    pairs.copy_(torch.stack(turned, dim=-1 if is_interleaved else -2))


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation by its name in bytetx: none, gelu (erf), gelu_tanh, relu, silu or tanh."""
    if activation == "none":
        return x
    if activation in _ON_CPU and _rounds_by_place(x):
        return _ON_CPU[activation](x.float()).to(x.dtype)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    return {"relu": torch.relu, "silu": F.silu, "tanh": torch.tanh}[activation](x)


def _rounds_by_place(x: Tensor) -> bool:
    """Whether torch's own gelu and silu would make a row's result depend on the rows beside it.

    On CPUs scalar code runs on the last elements of each thread's share, and rounds otherwise than
    the vector code before it. erf, exp and tanh in f32 do not.
    """
    return x.device.type == "cpu" and x.dtype != torch.float64 and not torch.compiler.is_compiling()


def _gelu_cpu(x: Tensor) -> Tensor:
    return torch.erf(x * math.sqrt(0.5)).add_(1).mul_(x).mul_(0.5)


def _gelu_tanh_cpu(x: Tensor) -> Tensor:
    inner = (x * x).mul_(0.044715).add_(1).mul_(x).mul_(math.sqrt(2 / math.pi))
    return inner.tanh_().add_(1).mul_(x).mul_(0.5)


def _silu_cpu(x: Tensor) -> Tensor:
    divisor = torch.exp(-x).add_(1)
    return torch.div(x, divisor, out=divisor)


_ON_CPU = {"gelu": _gelu_cpu, "gelu_tanh": _gelu_tanh_cpu, "silu": _silu_cpu}
_ROWS_IN_F32 = 256  # so few that their f32 copies are small beside a layer's activations


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, activation: str, residual: Tensor | None
) -> Tensor:
    """act(x @ weight.T + bias) (+ residual); x [m, k], weight [n, k], bias [n], residual [m, n]."""
    d = _activate_in_place(F.linear(x, weight, bias), activation)
    return d if residual is None else d + residual


def _activate_in_place(x: Tensor, activation: str) -> Tensor:
    """activate, whose result overwrites x: rows of an inner layer are not held twice."""
    if activation == "none":
        return x
    if activation in ("relu", "tanh"):
        return torch.relu_(x) if activation == "relu" else torch.tanh_(x)
    if _rounds_by_place(x):
        for rows in x.split(_ROWS_IN_F32):
            rows.copy_(activate(rows, activation))
        return x
    if activation == "silu":
        torch.ops.aten.silu_(x)
    else:
        torch.ops.aten.gelu_(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    return x


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, eps: float, residual: Tensor | None = None
) -> Tensor:
    """layer_norm(x + residual) over the last dim, sum and statistics in f32, in x's dtype."""
    h = x.float() if residual is None else x.float() + residual.float()
    return _norm(h, weight, bias, eps).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, residual: Tensor | None = None) -> Tensor:
    """h / sqrt(mean(h^2) + eps) * weight over the last dim, h = x + residual; f32, in x's dtype."""
    h = x.float() if residual is None else x.float() + residual.float()
    return F.rms_norm(h, (h.shape[-1],), weight.float(), eps).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 rows and their scales; see ops.quantize.quantize_rows."""
    rows = x.float()
    amax = rows.abs().amax(1, keepdim=True).clamp(min=2.0**-100)
    largest = torch.full_like(amax, 448)  # a plain number would be multiplied by its inverse
    fp8 = (rows * (largest / amax)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return fp8, (amax / largest).squeeze(1)


def fp8_linear(
    rows: Tensor,
    scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    *,
    activation: str,
    dtype: torch.dtype,
    out_scale: float | None,
) -> Tensor:
    """act(scaled products in f32 + bias); see ops.fp8_linear.fp8_linear."""
    d = (rows.float() @ weight.float().T) * weight_scale
    if scale is not None:
        d *= scale[:, None]
    d = activate(d if bias is None else d + bias, activation)
    if out_scale is None:
        return d.to(dtype)
    return (d / out_scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def _norm(h: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    shift = None if bias is None else bias.float()
    return F.layer_norm(h, (h.shape[-1],), weight.float(), shift, eps)


def embed(
    input_ids: Tensor,
    position_ids: Tensor | None,
    token_type_ids: Tensor | None,
    *,
    word: Tensor,
    position: Tensor | None = None,
    token_type: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-12,
    inputs_embeds: Tensor | None = None,
    bad_ids: Tensor | None = None,
) -> Tensor:
    """Sum in f32 of the rows that the ids name, then the norm where there is one; word's dtype.

    bad_ids: as in ops.embedding.embed, on any device; without it, bad ids raise.
    """
    notes = [None] * 3 if bad_ids is None else bad_ids.unbind()
    if inputs_embeds is None:
        h = _rows(word, "input_ids", input_ids, notes[0])
    else:
        h = inputs_embeds.float()
    if token_type is not None:
        assert token_type_ids is not None
        h = h + _rows(token_type, "token_type_ids", token_type_ids, notes[2])
    if position is not None:
        assert position_ids is not None
        h = h + _rows(position, "position_ids", position_ids, notes[1])
    if norm_weight is not None:
        h = _norm(h, norm_weight, norm_bias, eps)
    return h.to(word.dtype)


def _rows(table: Tensor, name: str, ids: Tensor, note: Tensor | None) -> Tensor:
    """table[ids] in f32.  note: int32 scalar for an id outside the table, whose row is NaN.

    Without it, on CUDA the ids are checked by torch's device-side assertion alone.
    """
    if note is not None and ids.numel():
        is_bad = (ids < 0) | (ids >= table.shape[0])
        # Without a wait for the GPU, as a CUDA graph needs; 0 where none is bad.
        first = is_bad.int().argmax().unsqueeze(0)
        found = ids.masked_fill(~is_bad, 0).index_select(0, first).squeeze(0)
        note.copy_(torch.where(found != 0, found, note))
        rows = F.embedding(ids.clamp(0, table.shape[0] - 1), table).float()
        return rows.masked_fill(is_bad.unsqueeze(1), torch.nan)
    if not ids.is_cuda and bool((is_bad := (ids < 0) | (ids >= table.shape[0])).any()):
        index = int(is_bad.nonzero()[0])
        raise ValueError(
            f"{name}[{index}] is {int(ids[index])}, but the table has {table.shape[0]} rows "
            f"(ids 0 to {table.shape[0] - 1})"
        )
    return F.embedding(ids, table).float()


def pool(
    x: Tensor,
    cu_seqlens: Tensor,
    *,
    mode: str,
    first_tokens: Tensor | None = None,
    normalize: bool = False,
) -> Tensor:
    """One f32 vector per sequence; see ops.pooling.pool.  Never synchronises with the device."""
    if x.shape[0] == 0:
        return torch.zeros(cu_seqlens.numel() - 1, x.shape[1], device=x.device)
    offsets = cu_seqlens.long()
    seqlens = offsets.diff()
    skipped = torch.zeros_like(seqlens) if first_tokens is None else first_tokens.long()
    num_kept = (seqlens - skipped).clamp_(min=0)
    if mode in ("cls", "lasttoken"):
        rows = offsets[:-1] + skipped if mode == "cls" else offsets[1:] - 1
        pooled = x[rows.clamp(0, x.shape[0] - 1)].float()
    else:
        pooled = _reduce_segments(x.float(), offsets, skipped, num_kept, mode)
    pooled = torch.where(num_kept[:, None] > 0, pooled, 0.0)
    return normalize_rows(pooled) if normalize else pooled


def normalize_rows(x: Tensor) -> Tensor:
    """x / max(its l2 norm, 1e-12), row by row; NaN, not 0, where the norm overflows."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_(min=1e-12)
    return x / norms.masked_fill_(norms.isinf(), torch.nan)


def _reduce_segments(
    x: Tensor, offsets: Tensor, skipped: Tensor, num_kept: Tensor, mode: str
) -> Tensor:
    """Sum, mean or max of x's rows in each sequence, without its first `skipped` rows.

    Sums are f64: segment_reduce adds row after row, which in f32 loses digits on long sequences.
    """
    seqlens = offsets.diff()
    # The index of each token in its sequence.
    index = torch.arange(x.shape[0], device=x.device) - torch.repeat_interleave(
        offsets[:-1], seqlens, output_size=x.shape[0]
    )
    num_skipped = torch.repeat_interleave(skipped, seqlens, output_size=x.shape[0])
    is_kept = index >= num_skipped
    if mode == "max":
        x = torch.where(is_kept[:, None], x, float("-inf"))
        return torch.segment_reduce(x, "max", offsets=offsets, axis=0, unsafe=True)
    weights = (index + 1).double() if mode == "weightedmean" else torch.ones_like(index).double()
    weights = torch.where(is_kept, weights, 0.0)
    x = torch.where(is_kept[:, None], x, 0.0) * weights[:, None]
    total = torch.segment_reduce(
        torch.cat((x, weights[:, None]), dim=1), "sum", offsets=offsets, axis=0, unsafe=True
    )
    divisor = total[:, -1:].clamp(min=1e-9)
    mean = total[:, :-1] / (divisor.sqrt() if mode == "mean_sqrt_len_tokens" else divisor)
    return mean.float()


def count_tokens(mask: Tensor) -> Tensor:
    """int32 [3, num_rows]; see ops.padding.count_tokens.  Never synchronises with the device."""
    is_token = mask.bool()
    if is_token.numel() == 0:
        return torch.zeros((3, len(mask)), dtype=torch.int32, device=mask.device)
    # A run of tokens begins where a token follows a pad or the row's start.
    starts = is_token[:, 0]
    num_runs = (is_token[:, 1:] > is_token[:, :-1]).sum(1, dtype=torch.int32) + starts
    return torch.stack((is_token.sum(1, dtype=torch.int32), num_runs, starts.int()))


def pack_padded(
    padded: PaddedIds,
    packed: PackedIds,
    *,
    num_texts: int,
    filler_tokens: int,
    position_offset: int,
    seqlens: Tensor | None,
    tables: IdTables | None,
    bad_ids: Tensor | None,
) -> Tensor | None:
    """See ops.padding.pack_padded.  Never synchronises with the device."""
    ids, mask, types = padded.input_ids, padded.mask, padded.token_type_ids
    is_token = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    num_tokens, flat = packed.input_ids.shape[0], is_token.flatten()
    packed_rows = flat.cumsum(0) - 1
    # The pads' go to a row behind all, which is cut off.
    targets = torch.where(flat, packed_rows, num_tokens).clamp(max=num_tokens)
    positions = padded.position_ids
    if positions is None and position_offset == 0:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0)
    elif positions is None:
        pad = position_offset - 1
        is_counted = ids != pad
        positions = is_counted.cumsum(1) * is_counted + pad
    rows_of = (
        (ids, packed.input_ids, None if tables is None else tables.word),
        (positions, packed.position_ids, None if tables is None else tables.position),
        (types, packed.token_type_ids, None if tables is None else tables.token_type),
    )
    for i, (given, out, num_rows) in enumerate(rows_of):
        if given is None:
            if out is not None:
                out.zero_()
            continue
        found = _as_int32(given).expand(ids.shape).reshape(-1)
        if out is not None:
            behind = torch.zeros(num_tokens + 1, dtype=torch.int32, device=ids.device)
            out.copy_(behind.scatter_(0, targets, found)[:num_tokens])
        if num_rows and bad_ids is not None and found.numel():
            is_bad = flat & ((found < 0) | (found >= num_rows))
            bad = found[is_bad.int().argmax()]
            bad_ids[i] = torch.where(is_bad.any(), bad, bad_ids[i])
    lengths, ends = is_token.sum(1), packed.cu_seqlens
    total = flat.sum()
    fillers = torch.arange(1, len(ends) - num_texts, device=ids.device) * filler_tokens
    ends.copy_(total.int().expand(len(ends)))
    ends[: len(ids)] = lengths.cumsum(0) - lengths
    ends[num_texts + 1 :] = (total + fillers).clamp(max=num_tokens)
    return None if mask is None else torch.where(flat, packed_rows, -1).int()


def _as_int32(ids: Tensor) -> Tensor:
    """ids as int32; one that is too large stays too large for every table, and never wraps."""
    limits = torch.iinfo(torch.int32)
    return ids if ids.dtype == torch.int32 else ids.clamp(limits.min, limits.max).int()


def unpack_padded(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows], zeros for -1; see ops.padding.unpack_padded."""
    if x.shape[0] == 0:
        return torch.zeros((len(rows), x.shape[1]), dtype=x.dtype, device=x.device)
    found = x[rows.clamp(min=0)]
    return found.masked_fill_((rows < 0).unsqueeze(1), 0)
