"""From logits to tokens, all rows at once, each with its own parameters; and the likeliest ones.

Every row's choice is a function of its own logits, parameters, seed and position: random numbers
are counted, not drawn from a generator that rows share, so that batch mates change nothing.
Nothing here waits for a GPU.
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bytetx.ops import native, triton_backend
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.log_softmax import log_softmax
from bytetx.ops.registry import Operation

# Logits are told apart by 1 / 128 over 32 below the largest one, where a CPU looks for the end of a
# nucleus: the tokens of one such step are few and are sorted, the others are only summed. Sorting
# 32 rows of 50 000 logits took 20 times as long.
_NUCLEUS_STEPS = 4096
_STEPS_A_NAT = 128
_NUCLEUS_ROWS = 4  # rows at a time: so few that their temporaries stay in the cache

# Tokens whose weights are summed before anything is accumulated: an f64 prefix sum over a whole
# vocabulary would take longer than all the rest.
_BLOCK_TOKENS = 256

# SplitMix64 (Steele, Lea, Flood 2014: Fast splittable pseudorandom number generators), as int64.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of each row for tokens that it has had.

    output_counts: int32 [n, vocab_size], how often each token is in the answer.  in_prompt: bool
    [n, vocab_size].  repetition, presence, frequency: f32 [n]; 1, 0 and 0 change nothing.
    """

    output_counts: Tensor
    in_prompt: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """Numbers added to single logits: rows, tokens int64 [m], values f32 [m]; pairs may repeat."""

    rows: Tensor
    tokens: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Filters:
    """Which tokens rows may choose.  None: no row has that limit.

    top_k: int64 [n], 0 keeps all.  min_p: f32 [n], 0 keeps all.  top_p: f32 [n], 1 keeps all; its
    share is of the probability of the tokens that top_k and min_p keep.
    max_top_k: host int, the largest of top_k.  has_open_nucleus: whether a row has a top_p and no
    top_k, so that its nucleus may be as large as the vocabulary.
    """

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    max_top_k: int = 0
    has_open_nucleus: bool = False

    @property
    def any(self) -> bool:
        return not (self.top_k is None and self.top_p is None and self.min_p is None)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """Log-probabilities of chosen tokens and of the most likely ones.

    chosen: f32 [n].  ranks: int32 [n], 1 for the most likely token.  values: f32 [n, k], falling;
    token_ids: int32 [n, k].
    """

    chosen: Tensor
    ranks: Tensor
    values: Tensor
    token_ids: Tensor


def adjust_logits(
    logits: Tensor, *, penalties: Penalties | None = None, biases: Biases | None = None
) -> Tensor:
    """Logits [n, vocab_size] in f32 after biases, then penalties; the argument is left as it is.

    The order matters: a repetition penalty multiplies the biased logit.
    """
    require_tensor("logits", logits, shape=(None, None))
    x = logits.float()
    if biases is not None:
        x = x.index_put((biases.rows, biases.tokens), biases.values, accumulate=True)
    if penalties is not None:
        x = _penalize(x, penalties)
    return x


def mask_logits(logits: Tensor, masks: Tensor, *, rows: Tensor | None = None) -> Tensor:
    """Logits [n, vocab_size] with -inf for tokens that a row's mask leaves out; a new tensor.

    masks: int32 [m, words], packed: bit i % 32 of word i // 32 stands for token i, and is set where
    it stays.  rows: int64 [m], those that the masks are for; None: all n, in order.
    """
    require_tensor("logits", logits, shape=(None, None))
    words = -(-logits.shape[1] // 32)
    require_tensor("masks", masks, shape=(None, words), dtypes=(torch.int32,), device=logits.device)
    # A byte of a mask is an index of its eight bools, which are read as one integer.
    bools = _bools_of_bytes(logits.device)
    index = masks.view(torch.uint8).int().flatten()
    stays = bools.index_select(0, index).view(torch.bool).view(len(masks), 32 * words)
    stays = stays[:, : logits.shape[1]]
    if rows is None:
        return torch.where(stays, logits, -torch.inf)
    masked = torch.where(stays, logits.index_select(0, rows), -torch.inf)
    return logits.index_copy(0, rows, masked)


# torch's maximum runs in vectors on a CPU and its argmax does not: the largest block comes first.
_ARGMAX_BLOCK = 256
_LEAST_BLOCKS = 16


@cache
def _bools_of_bytes(device: torch.device) -> Tensor:
    """int64 [256]: the bits of each byte as bools, the lowest first."""
    bits = torch.arange(256).unsqueeze(1) >> torch.arange(8) & 1
    return bits.bool().view(torch.int64).flatten().to(device)


def is_bad_row(logits: Tensor) -> Tensor:
    """bool [n]: rows that nothing can be chosen from, for they hold NaN or inf or forbid all."""
    return ~torch.isfinite(logits.amax(dim=-1))


def greedy(logits: Tensor) -> Tensor:
    """int32 [n]: the most likely token of each row of [n, vocab_size], the first of equals."""
    vocab_size = logits.shape[1]
    whole = vocab_size // _ARGMAX_BLOCK * _ARGMAX_BLOCK
    if whole < _LEAST_BLOCKS * _ARGMAX_BLOCK or not len(logits):
        return logits.argmax(dim=-1).int()
    largest = logits[:, :whole].unflatten(1, (-1, _ARGMAX_BLOCK)).amax(-1)
    if whole < vocab_size:
        largest = torch.cat((largest, logits[:, whole:].amax(-1, keepdim=True)), 1)
    first = largest.argmax(dim=-1, keepdim=True) * _ARGMAX_BLOCK
    columns = first + torch.arange(_ARGMAX_BLOCK, device=logits.device)
    columns.clamp_(max=vocab_size - 1)
    place = logits.gather(1, columns).argmax(dim=-1, keepdim=True)
    tokens: Tensor = (first + place).squeeze(1).int()
    return tokens


def sample(
    logits: Tensor,
    temperature: Tensor,
    filters: Filters,
    *,
    seeds: Tensor,
    positions: Tensor,
    has_greedy: bool = True,
) -> Tensor:
    """int32 [n]: a token of each row, drawn from softmax(logits / temperature) among those kept.

    logits: [n, vocab_size].  temperature: f32 [n]; rows with 0 take the most likely token.
    seeds: int64 [n].  positions: int64 [n], of the token that is drawn, which makes it another
    number of the same seed.  has_greedy: False where no temperature is 0, which saves a pass.
    A bad row (is_bad_row) gets any token.
    """
    require_tensor("logits", logits, shape=(None, None))
    x = logits.float()
    num_rows, vocab_size = x.shape
    num_blocks = -(-vocab_size // _BLOCK_TOKENS)
    padded = x.new_full((num_rows, num_blocks * _BLOCK_TOKENS), -torch.inf)
    scaled = padded[:, :vocab_size]
    torch.sub(x, x.amax(dim=-1, keepdim=True), out=scaled)
    scaled /= torch.where(temperature == 0, 1.0, temperature).unsqueeze(1)
    if filters.any:
        scaled.masked_fill_(scaled < _lowest_kept(scaled, filters), -torch.inf)
    blocks = padded.exp_().view(num_rows, num_blocks, _BLOCK_TOKENS)
    drawn = _draw(blocks, uniform(seeds, positions)).clamp_(max=vocab_size - 1)
    if has_greedy:
        drawn = torch.where(temperature == 0, x.argmax(dim=-1), drawn)
    return drawn.int()


def uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """f64 [n] in [0, 1), multiples of 2**-52: number `position` of the stream of each seed."""
    mixed = _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _GOLDEN)
    return _shift_right(mixed, 12).double() * 2.0**-52


def top_logprobs(logits: Tensor, token_ids: Tensor, *, k: int) -> TopLogprobs:
    """Log-softmax of [n, vocab_size] at token_ids [n] and at the k most likely tokens.

    k: at most vocab_size are given; 0 gives the chosen ones alone.
    """
    require_tensor("logits", logits, shape=(None, None))
    logprobs = log_softmax(logits)
    chosen = logprobs.gather(1, token_ids.long().unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=-1, dtype=torch.int32) + 1
    values, ids = logprobs.topk(min(k, logits.shape[1]), dim=-1)
    return TopLogprobs(chosen.squeeze(1), ranks, values, ids.int())


def _penalize(x: Tensor, penalties: Penalties) -> Tensor:
    counts = penalties.output_counts
    is_in_output = counts > 0
    repetition = penalties.repetition.unsqueeze(1)
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    x = torch.where(is_in_output | penalties.in_prompt, repeated, x)
    x = x - counts * penalties.frequency.unsqueeze(1)
    return x - is_in_output * penalties.presence.unsqueeze(1)


def _lowest_kept(x: Tensor, filters: Filters) -> Tensor:
    """[n, 1]: the least logit that each row keeps; the largest of x is 0 in every row.

    top_k keeps what is at least the k-th largest, min_p what is at least log(min_p). top_p keeps a
    token where those that are more likely have less than top_p together, of what both kept; the
    most likely one always.
    """
    lowest = torch.full_like(x[:, :1], -torch.inf)
    if filters.min_p is not None:
        lowest = filters.min_p.log().unsqueeze(1)
    finds_unsorted = filters.has_open_nucleus and not x.is_cuda
    by_min_p = lowest
    if filters.top_k is not None or (filters.top_p is not None and not finds_unsorted):
        candidates = x.topk(_num_candidates(x, filters), dim=-1).values
        if filters.top_k is not None:
            lowest = _kth(candidates, filters.top_k).maximum(lowest)
        if filters.top_p is not None:
            lowest = _nucleus(x, candidates, lowest, filters.top_p)
    if filters.top_p is not None and finds_unsorted:
        rows = _open_rows(filters).nonzero().squeeze(1)
        lowest = lowest.clone()
        for some in rows.split(_NUCLEUS_ROWS):
            kept = x[some]
            if filters.min_p is not None:
                kept.masked_fill_(kept < by_min_p[some], -torch.inf)
            lowest[some] = _open_nucleus(kept, filters.top_p[some].unsqueeze(1))
    return lowest


def _num_candidates(x: Tensor, filters: Filters) -> int:
    """How many of the largest logits are sorted: those that any limit can lie in.

    A CPU finds the end of an open nucleus without sorting; a GPU would have to wait for it.
    """
    if filters.has_open_nucleus and x.is_cuda:
        return x.shape[1]
    return min(max(filters.max_top_k, 1), x.shape[1])


def _kth(candidates: Tensor, top_k: Tensor) -> Tensor:
    """[n, 1]: the k-th largest, -inf where a row keeps all."""
    k = top_k.clamp(1, candidates.shape[1]).unsqueeze(1)
    return candidates.gather(1, k - 1).masked_fill(top_k.unsqueeze(1) == 0, -torch.inf)


def _nucleus(x: Tensor, candidates: Tensor, lowest: Tensor, top_p: Tensor) -> Tensor:
    """[n, 1]: the least logit of the nucleus of what is at least `lowest`."""
    is_limited = (top_p < 1).unsqueeze(1)
    mass = x.exp().masked_fill_(x < lowest, 0).sum(dim=-1, keepdim=True)
    weights = candidates.exp().masked_fill_(candidates < lowest, 0).double()
    more_likely = weights.cumsum(dim=-1) - weights
    num_kept = (more_likely < top_p.unsqueeze(1) * mass).sum(dim=-1, keepdim=True).clamp_(min=1)
    least = candidates.gather(1, num_kept - 1)
    return torch.where(is_limited, least, -torch.inf).maximum(lowest)


def _open_rows(filters: Filters) -> Tensor:
    """bool [n]: rows with a top_p and no top_k."""
    assert filters.top_p is not None
    is_limited = filters.top_p < 1
    return is_limited if filters.top_k is None else is_limited & (filters.top_k == 0)


def _open_nucleus(x: Tensor, top_p: Tensor) -> Tensor:
    """[n, 1]: the least logit of the nucleus of whole rows, their largest logit being 0."""
    steps = x.mul(-_STEPS_A_NAT).clamp_(max=_NUCLEUS_STEPS - 1).long().clamp_(min=0)
    sums = x.new_zeros((x.shape[0], _NUCLEUS_STEPS), dtype=torch.float64)
    sums.scatter_add_(1, steps, x.exp().double())
    reached = sums.cumsum(dim=-1)
    target = top_p * reached[:, -1:]
    step = torch.searchsorted(reached, target).clamp_(max=_NUCLEUS_STEPS - 1)
    rows, tokens = (steps == step).nonzero(as_tuple=True)
    counts = rows.bincount(minlength=x.shape[0])
    places = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
    most = max(int(counts.max()), 1)  # rows of NaN alone have none
    inside = x.new_full((x.shape[0], most), -torch.inf)
    inside[rows, places] = x[rows, tokens]
    inside = inside.sort(dim=-1, descending=True).values
    weights = inside.exp().double()
    more_likely = reached.gather(1, step) - sums.gather(1, step) + weights.cumsum(dim=-1) - weights
    num_kept = ((more_likely < target) & (inside > -torch.inf)).sum(dim=-1, keepdim=True)
    return inside.gather(1, num_kept.clamp_(min=1) - 1)


def _draw(blocks: Tensor, numbers: Tensor) -> Tensor:
    """int64 [n]: the tokens where these shares [n] of the weights [n, blocks, tokens] are reached.

    In order of the vocabulary, so that no row's draw depends on another row's limits.
    """
    # A GPU sums as many rows in another order, which f64 hides; a CPU would copy all to f64 first.
    wide = torch.float64 if blocks.is_cuda else torch.float32
    sums = blocks.sum(dim=-1, dtype=wide)
    cumulative = sums.cumsum(dim=-1, dtype=torch.float64)
    target = numbers.unsqueeze(1) * cumulative[:, -1:]
    block = torch.searchsorted(cumulative, target, right=True).clamp_(max=blocks.shape[1] - 1)
    reached = cumulative.gather(1, block)
    weight = sums.gather(1, block).double()
    share = ((target - (reached - weight)) / weight).clamp_(min=0)
    weights = blocks.gather(1, block.unsqueeze(2).expand(-1, 1, blocks.shape[2])).squeeze(1)
    within = weights.cumsum(dim=-1, dtype=torch.float64)
    place = torch.searchsorted(within, share * within[:, -1:], right=True)
    # Rounding may put a share at the very end: the last token that has a weight stands there.
    last = torch.searchsorted(within, within[:, -1:].contiguous())
    return (block * blocks.shape[2] + place.minimum(last)).squeeze(1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """x >> bits of 64 unsigned bits; torch's own shift repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


# Shape class: whether there are columns.  run(logits, slot_indices, last_tokens) as of argmax.
ARGMAX = Operation("argmax")


def argmax(
    logits: Tensor, *, slot_indices: Tensor | None = None, last_tokens: Tensor | None = None
) -> Tensor:
    """int32 [n]: the first largest of each row of logits [n, vocab_size], -1 for a bad row.

    logits: f32, bf16 or f16, contiguous.  A bad row holds NaN or inf, or nothing but -inf.
    slot_indices: int32 [n], last_tokens: int32, or neither: last_tokens[slot_indices[i]] becomes
    the token of row i, 0 for a bad row; of rows with the same slot index, that of any one.
    Raises ValueError on shape, dtype or device mismatch.
    """
    require_tensor("logits", logits, shape=(None, None))
    require_contiguous("logits", logits)
    if (slot_indices is None) != (last_tokens is None):
        raise ValueError("slot_indices and last_tokens must be given both, or neither")
    if slot_indices is not None and last_tokens is not None:
        int32, device = (torch.int32,), logits.device
        shape = logits.shape[:1]
        require_tensor("slot_indices", slot_indices, shape=shape, dtypes=int32, device=device)
        require_tensor("last_tokens", last_tokens, shape=(None,), dtypes=int32, device=device)
    chosen: Tensor = ARGMAX.choose(logits.device, logits.shape[1] > 0).run(
        logits, slot_indices, last_tokens
    )
    return chosen


@ARGMAX.native_kernel("cuda")
def _run_kernel(logits: Tensor, slot_indices: Tensor | None, last_tokens: Tensor | None) -> Tensor:
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    native.require_kernel("argmax", logits.device)(
        logits=logits,
        slot_indices=slot_indices,
        out=out,
        last_tokens=last_tokens,
        num_rows=logits.shape[0],
        vocab_size=logits.shape[1],
        dtype=native.DTYPE_CODES[logits.dtype],
        launch=native.launch_args(logits.device),
    )
    return out


@ARGMAX.triton_kernel(takes=lambda device, has_columns: has_columns)
def _run_triton(logits: Tensor, slot_indices: Tensor | None, last_tokens: Tensor | None) -> Tensor:
    tokens: Tensor = triton_backend.kernels(logits.device).argmax(
        logits, slot_indices=slot_indices, last_tokens=last_tokens
    )
    return tokens


@ARGMAX.in_torch()
def _run_torch(logits: Tensor, slot_indices: Tensor | None, last_tokens: Tensor | None) -> Tensor:
    out = torch.where(is_bad_row(logits), -1, greedy(logits))
    if slot_indices is not None and last_tokens is not None:
        last_tokens.index_copy_(0, slot_indices.long(), out.clamp(min=0))
    return out
