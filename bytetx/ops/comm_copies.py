"""Transport by copy engines: they move rows between GPUs while cuBLAS multiplies.

A rank's GEMM is split by the rank that owns the rows. all_gather_gemm begins with its own rows
while the others' arrive. gemm_reduce_scatter begins with the others' rows, whose partial sums are
sent while it computes its own; a kernel sums all parts.
It pays where each GEMM is long enough to hide a copy and the GPUs run at their power limit.
Source: Flux (arXiv 2406.06858), section 4.3, and the decomposition that it compares with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytetx.ops import comm_kernels, native
from bytetx.ops.comm_epilogue import SumEpilogue
from bytetx.ops.linear import LinearWeight
from bytetx.ops.weight import Weight


@dataclass(frozen=True, slots=True)
class CopyMemory:
    """The region of every rank that copies write to.

    memory: PeerMemory.  addresses: each rank's region, as this device addresses it.  own: this
    rank's region, uint8.  side: the stream of copies.
    """

    memory: object
    addresses: tuple[int, ...]
    own: Tensor
    side: torch.cuda.Stream
    rank: int

    @property
    def size(self) -> int:
        return len(self.addresses)

    def rows(self, first: int, count: int, like: Tensor) -> Tensor:
        """Rows of this rank's region, in the width and dtype of `like`."""
        row_bytes = like.shape[1] * like.itemsize
        rows = self.own[first * row_bytes : (first + count) * row_bytes]
        return rows.view(like.dtype).view(count, like.shape[1])

    def barrier(self) -> None:
        """Returns (on the stream) when every rank's region may be written."""
        launch = native.launch_args(self.own.device)
        native.require_kernel("barrier", self.own.device)(peers=self.memory, launch=launch)

    def send(self, rows: Tensor, to: int, first: int) -> None:
        """Copies rows to row `first` of a rank's region, after the current stream's work."""
        self.side.wait_stream(torch.cuda.current_stream())
        row_bytes = rows.shape[1] * rows.itemsize
        launch = native.launch_args(self.own.device)
        native.require_kernel("send_copy", self.own.device)(
            peers=self.memory,
            to=to,
            place=self.addresses[to] + first * row_bytes,
            rows=rows,
            bytes=rows.numel() * rows.itemsize,
            launch=launch._replace(stream=self.side.cuda_stream),
        )

    def wait(self, sources: Iterable[int]) -> None:
        """Waits (on the stream) for what these ranks send."""
        mask = sum(1 << source for source in sources)
        native.require_kernel("wait_copies", self.own.device)(
            peers=self.memory, sources=mask, launch=native.launch_args(self.own.device)
        )

    def end(self) -> None:
        """Waits (on the stream) until everything sent has been read."""
        torch.cuda.current_stream().wait_stream(self.side)


def all_gather_gemm(
    x: Tensor,
    w: Weight,
    *,
    copies: CopyMemory,
    row_offsets: Sequence[int],
    activation: str,
) -> Tensor:
    """As comm_gemm.all_gather_gemm, on checked arguments that fit."""
    plain = w.dense
    own, end = row_offsets[copies.rank], row_offsets[copies.rank + 1]
    copies.barrier()
    for step in range(1, copies.size):
        copies.send(x, (copies.rank - step) % copies.size, own)
    rows = copies.rows(0, row_offsets[-1], x)
    d = x.new_empty((len(rows), plain.n))
    # cuBLAS fuses this activation into its GEMM.
    is_fused = activation == "gelu_tanh" and plain.bias is not None and not w.block and x.is_cuda
    multiply = _multiply_gelu if is_fused else _multiply
    multiply(x, plain, d[own:end])
    # The copies arrive in this order.
    for step in range(1, copies.size):
        source = (copies.rank + step) % copies.size
        first, last = row_offsets[source], row_offsets[source + 1]
        copies.wait([source])
        multiply(rows[first:last], plain, d[first:last])
    copies.end()
    return d if is_fused else w.activated(d, activation)


def gemm_reduce_scatter(
    x: Tensor,
    w: LinearWeight,
    epilogue: SumEpilogue,
    *,
    copies: CopyMemory,
    row_offsets: Sequence[int],
    partial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As comm_gemm.gemm_reduce_scatter, on checked arguments that fit."""
    parts = partial_sums(x, w, copies=copies, row_offsets=row_offsets, partial=partial)
    return comm_kernels.sum_copies(parts, epilogue, copies.memory, size=copies.size)


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
    del sent  # the copies have read it
    return parts


def _send_products(
    x: Tensor,
    w: LinearWeight,
    copies: CopyMemory,
    row_offsets: Sequence[int],
    *,
    partial: Tensor | None,
) -> list[Tensor]:
    """Sends x @ w.T + partial of the others' rows to their owners, the next rank's first.

    Returns what must live until the copies have read it.
    """
    sent = []
    for step in range(1, copies.size):
        peer = (copies.rank + step) % copies.size
        rows = slice(row_offsets[peer], row_offsets[peer + 1])
        count = rows.stop - rows.start
        part = x.new_empty((count, w.n))
        _multiply(x[rows], w, part, None if partial is None else partial[rows])
        copies.send(part, peer, copies.rank * count)
        sent.append(part)
    return sent


def _own(rows: Tensor, copies: CopyMemory, row_offsets: Sequence[int]) -> Tensor:
    return rows[row_offsets[copies.rank] : row_offsets[copies.rank + 1]]


def _parts(x: Tensor, w: LinearWeight, copies: CopyMemory, row_offsets: Sequence[int]) -> Tensor:
    """The part of this rank's region that holds all ranks' partial sums of its rows."""
    count = row_offsets[copies.rank + 1] - row_offsets[copies.rank]
    return copies.rows(0, copies.size * count, x.new_empty((0, w.n)))


def _multiply_gelu(x: Tensor, w: LinearWeight, out: Tensor) -> None:
    if len(x) and w.bias is not None:
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
