"""Long GEMMs with their communication: copy engines move rows beside cuBLAS, multiprocessors none.

A rank's GEMM is cut by whose rows they are. all_gather_gemm begins with its own, while those of the
others come; gemm_reduce_scatter with those of the others, whose sums leave while it goes on to its
own: by cuBLAS, before all are summed up, or by a kernel that adds what has come to its products.
Worth it where either part is long enough to hide a copy and GPUs run at their power limit.
Source: Flux (arXiv 2406.06858), section 4.3, and the decomposition that it compares with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytetx.ops import comm_kernels, native, reference
from bytetx.ops.gated import GatedWeight, gate
from bytetx.ops.linear import LinearWeight

# Own rows, of which the first half is summed while the last rank's part of the second one comes; it
# ends with tiles of a pair of CTAs.
_HALVES_STEP = 256


@dataclass(frozen=True, slots=True)
class CopyMemory:
    """Where copies come: a region of every rank that is read and written as calls like it.

    memory: PeerMemory.  places: every rank's region, as addresses here.  own: this rank's, uint8.
    side: the stream of copies.
    """

    memory: object
    places: tuple[int, ...]
    own: Tensor
    side: torch.cuda.Stream
    rank: int

    @property
    def size(self) -> int:
        return len(self.places)

    def rows(self, first: int, count: int, like: Tensor) -> Tensor:
        """Rows of this rank's region, as wide as like's and of its dtype."""
        row_bytes = like.shape[1] * like.itemsize
        piece = self.own[first * row_bytes : (first + count) * row_bytes]
        return piece.view(like.dtype).view(count, like.shape[1])

    def barrier(self) -> None:
        """After it every rank's region may be written."""
        launch = native.launch_args(self.own.device)
        native.kernel("barrier", self.own.device)(self.memory, *launch)

    def send(self, rows: Tensor, to: int, first: int, *, is_early: bool = False) -> None:
        """Rows, when the current stream has come here, to row `first` of a rank's region.

        is_early: the first of two copies to this rank, which it can wait for alone.
        """
        self.side.wait_stream(torch.cuda.current_stream())
        row_bytes = rows.shape[1] * rows.itemsize
        device, _, *rest = native.launch_args(self.own.device)
        native.kernel("send_copy", self.own.device)(
            self.memory,
            to,
            self.places[to] + first * row_bytes,
            rows.data_ptr(),
            rows.numel() * rows.itemsize,
            is_early,
            device,
            self.side.cuda_stream,
            *rest,
        )

    def wait(self, sources: Iterable[int], *, is_early: bool = False) -> None:
        """Until what these ranks have sent is here, or the first of their two copies."""
        mask = sum(1 << source for source in sources)
        native.kernel("wait_copies", self.own.device)(
            self.memory, mask, is_early, *native.launch_args(self.own.device)
        )

    def end(self) -> None:
        """Until what was sent has left."""
        torch.cuda.current_stream().wait_stream(self.side)


def all_gather_gemm(
    x: Tensor,
    w: LinearWeight | GatedWeight,
    *,
    copies: CopyMemory,
    row_offsets: Sequence[int],
    activation: str,
) -> Tensor:
    """On checked arguments that fit; as of comm_gemm.all_gather_gemm."""
    plain = w.fused if isinstance(w, GatedWeight) else w
    own, end = row_offsets[copies.rank], row_offsets[copies.rank + 1]
    copies.barrier()
    for turn in range(1, copies.size):
        copies.send(x, (copies.rank - turn) % copies.size, own)
    rows = copies.rows(0, row_offsets[-1], x)
    d = x.new_empty((len(rows), plain.n))
    # cuBLAS has one of the activations at the end of its GEMM.
    is_fused = activation == "gelu_tanh" and plain.bias is not None and plain is w and x.is_cuda
    multiply = _multiply_gelu if is_fused else _multiply
    multiply(x, plain, d[own:end])
    for turn in range(1, copies.size):  # in the order in which they come
        source = (copies.rank + turn) % copies.size
        first, last = row_offsets[source], row_offsets[source + 1]
        copies.wait([source])
        multiply(rows[first:last], plain, d[first:last])
    copies.end()
    if isinstance(w, GatedWeight):
        return gate(d, w, activation=activation)
    return d if is_fused else reference.activate(d, activation)


def partial_sums(
    x: Tensor,
    w: LinearWeight,
    *,
    copies: CopyMemory,
    row_offsets: Sequence[int],
    partial: Tensor | None,
) -> Tensor:
    """All ranks' x @ w.T + partial of this rank's rows, [size * own rows, n], in its region."""
    copies.barrier()
    sent = _send_products(x, w, copies, row_offsets, partial=partial)
    own, parts = _own(x, copies, row_offsets), _parts(x, w, copies, row_offsets)
    part = parts[copies.rank * len(own) : (copies.rank + 1) * len(own)]
    _multiply(own, w, part, None if partial is None else _own(partial, copies, row_offsets))
    copies.wait(peer for peer in range(copies.size) if peer != copies.rank)
    copies.end()
    del sent  # it has left
    return parts


def added_sums(
    x: Tensor,
    w: LinearWeight,
    *,
    copies: CopyMemory,
    row_offsets: Sequence[int],
    residual: Tensor,
    bias: Tensor | None,
    tiling: str,
) -> Tensor:
    """All ranks' x @ w.T of this rank's rows + bias + residual, [own rows, n].

    Two copies go to the rank whose rows come last, so that it has the first of them when it begins
    its own rows, to which it adds them.  tiling: of the GEMM that does.
    """
    rank, size = copies.rank, copies.size
    copies.barrier()
    sent = _send_products(x, w, copies, row_offsets, are_last_halved=True)
    own = _own(x, copies, row_offsets)
    h = own.new_empty((len(own), w.n))
    options = {"residual": residual, "bias": bias, "out": h, "rank": rank, "size": size}
    options |= {"parts": _parts(x, w, copies, row_offsets), "tiling": tiling}
    others, last = set(range(size)) - {rank}, {(rank + 1) % size} - {rank}
    copies.wait(others - last)
    half = _first_half(len(own))
    if half:
        copies.wait(last, is_early=True)
        comm_kernels.gemm_add_parts(own, w, rows=(0, half), **options)
    copies.wait(last)
    comm_kernels.gemm_add_parts(own, w, rows=(half, len(own)), **options)
    copies.end()
    del sent  # it has left
    return h


def _send_products(
    x: Tensor,
    w: LinearWeight,
    copies: CopyMemory,
    row_offsets: Sequence[int],
    *,
    partial: Tensor | None = None,
    are_last_halved: bool = False,
) -> list[Tensor]:
    """x @ w.T + partial of the others' rows to their owners, the next rank's first.

    are_last_halved: the last owner's in two copies.  Returns what must live until it has left.
    """
    sent = []
    for turn in range(1, copies.size):
        peer = (copies.rank + turn) % copies.size
        offset, count = row_offsets[peer], row_offsets[peer + 1] - row_offsets[peer]
        half = _first_half(count) if are_last_halved and turn == copies.size - 1 else 0
        for first, end in [(0, half)] * (half > 0) + [(half, count)]:
            rows = slice(offset + first, offset + end)
            part = x.new_empty((end - first, w.n))
            _multiply(x[rows], w, part, None if partial is None else partial[rows])
            copies.send(part, peer, copies.rank * count + first, is_early=end < count)
            sent.append(part)
    return sent


def _own(rows: Tensor, copies: CopyMemory, row_offsets: Sequence[int]) -> Tensor:
    return rows[row_offsets[copies.rank] : row_offsets[copies.rank + 1]]


def _parts(x: Tensor, w: LinearWeight, copies: CopyMemory, row_offsets: Sequence[int]) -> Tensor:
    """Where all ranks' parts of this one's rows come."""
    count = row_offsets[copies.rank + 1] - row_offsets[copies.rank]
    return copies.rows(0, copies.size * count, x.new_empty((0, w.n)))


def _first_half(count: int) -> int:
    """Rows of the first of two pieces of `count` rows; 0 where there is only one."""
    return count // 2 // _HALVES_STEP * _HALVES_STEP


def _multiply_gelu(x: Tensor, w: LinearWeight, out: Tensor) -> None:
    if len(x):
        torch._addmm_activation(w.bias, x, w.weight.t(), use_gelu=True, out=out)


def _multiply(x: Tensor, w: LinearWeight, out: Tensor, partial: Tensor | None = None) -> None:
    if not len(x):
        return
    if w.bias is None:
        torch.mm(x, w.weight.t(), out=out)
    else:
        torch.addmm(w.bias, x, w.weight.t(), out=out)
    if partial is not None:
        out.add_(partial)
