"""Long GEMMs with their communication: copy engines move rows beside cuBLAS, multiprocessors none.

A rank's GEMM is cut by whose rows they are. all_gather_gemm begins with its own, while those of the
others come; gemm_reduce_scatter with those of the others, whose sums leave while it goes on to its
own. Worth it where either part is long enough to hide a copy and GPUs run at their power limit.
Source: Flux (arXiv 2406.06858), section 4.3, and the decomposition that it compares with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bytetx.ops import native, reference
from bytetx.ops.gated import GatedWeight, gate
from bytetx.ops.linear import LinearWeight


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

    def meet(self) -> None:
        """From here on every rank's region may be written."""
        native.kernel("meet", self.own.device)(self.memory, *native.launch_args(self.own.device))

    def send(self, rows: Tensor, to: int, first: int) -> None:
        """Rows, when the current stream has come here, to row `first` of a rank's region."""
        self.side.wait_stream(torch.cuda.current_stream())
        row_bytes = rows.shape[1] * rows.itemsize
        device, _, *rest = native.launch_args(self.own.device)
        native.kernel("send_copy", self.own.device)(
            self.memory,
            to,
            self.places[to] + first * row_bytes,
            rows.data_ptr(),
            rows.numel() * rows.itemsize,
            device,
            self.side.cuda_stream,
            *rest,
        )

    def wait(self, sources: Iterable[int]) -> None:
        """Until what these ranks have sent is here."""
        mask = sum(1 << source for source in sources)
        native.kernel("await_copies", self.own.device)(
            self.memory, mask, *native.launch_args(self.own.device)
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
    copies.meet()
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
    copies.meet()
    sent = []  # until it has left
    for turn in range(1, copies.size):
        peer = (copies.rank + turn) % copies.size
        first, end = row_offsets[peer], row_offsets[peer + 1]
        part = x.new_empty((end - first, w.n))
        _multiply(x[first:end], w, part, None if partial is None else partial[first:end])
        copies.send(part, peer, copies.rank * (end - first))
        sent.append(part)
    first, end = row_offsets[copies.rank], row_offsets[copies.rank + 1]
    count = end - first
    parts = copies.rows(0, copies.size * count, x.new_empty((0, w.n)))
    own = parts[copies.rank * count : (copies.rank + 1) * count]
    _multiply(x[first:end], w, own, None if partial is None else partial[first:end])
    copies.wait(peer for peer in range(copies.size) if peer != copies.rank)
    copies.end()
    return parts


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
