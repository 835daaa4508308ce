"""FlashAttention-3 as a rival, from the library that vLLM's wheel carries for Hopper GPUs."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from bytetx.errors import BytetxError, OptionError

NAME = "flash-attention-3"
NOT_GIVEN = f"{NAME} left out: no library given; --fa3 FILE names one, see docs/performance.md"
_NAMESPACE = "_vllm_fa3_C"
_WHERE = "_vllm_fa3_C.abi3.so of the PyPI wheel vllm==0.24.0 is one"


class FlashAttention3:
    """The library's forward kernel, dense and paged; f16 or bf16, on a Hopper GPU."""

    def __init__(self, library: Path):
        """Raises OptionError where there is no such file, BytetxError where it does not load."""
        if not library.is_file():
            raise OptionError(f"--fa3 needs a library's file, got {library}: {_WHERE}")
        try:
            torch.ops.load_library(str(library.resolve()))
            self._operators = getattr(torch.ops, _NAMESPACE)
            self._forward = self._operators.fwd
        except (OSError, RuntimeError, AttributeError) as error:
            summary = str(error).partition("\n")[0]
            raise BytetxError(
                f"--fa3 {library} gives no FlashAttention-3 under torch {torch.__version__} "
                f"({summary}); {_WHERE}, for torch 2.11"
            ) from error

    def varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        *,
        max_seqlen: int,
        causal: bool = False,
        window: int = 0,
    ) -> Tensor:
        """varlen_attention of ours: packed rows [total_tokens, num_heads, head_dim]."""
        return self._run(
            _Operands(q, k, v, cu_seqlens, cu_seqlens_k=cu_seqlens),
            max_seqlens=(max_seqlen, max_seqlen),
            causal=causal,
            window=window,
        )

    def paged_plan(
        self,
        cu_seqlens: Tensor,
        kv_seqlens: Tensor,
        *,
        max_seqlen: int,
        max_kv_seqlen: int,
        heads: tuple[int, int, int],
        page_size: int,
        dtype: torch.dtype,
    ) -> Tensor:
        """The scheduler's metadata of a step, which its layers share.

        heads: (num_heads, num_kv_heads, head_dim).
        """
        num_heads, num_kv_heads, head_dim = heads
        plan: Tensor = self._operators.get_scheduler_metadata(
            len(kv_seqlens),
            max_seqlen,
            max_kv_seqlen,
            num_heads,
            num_kv_heads,
            head_dim,
            head_dim,  # of v
            dtype,
            kv_seqlens,
            cu_seqlens,
            None,  # cu_seqlens_k
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            None,  # leftpad_k
            page_size,
            0,  # max_seqlen_k_new
            True,  # causal
            -1,  # window_size_left
            -1,  # window_size_right
            False,  # has_softcap
            0,  # num_splits: chosen by the library
            None,  # pack_gqa: chosen by the library
            0,  # sm_margin
        )
        return plan

    def paged(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        cu_seqlens: Tensor,
        kv_seqlens: Tensor,
        max_seqlen: int,
        max_kv_seqlen: int,
        page_table: Tensor,
        plan: Tensor,
    ) -> Tensor:
        """paged_attention of ours, with paged_plan's metadata."""
        return self._run(
            _Operands(
                q, k_cache, v_cache, cu_seqlens, kv_seqlens=kv_seqlens, page_table=page_table
            ),
            max_seqlens=(max_seqlen, max_kv_seqlen),
            causal=True,
            plan=plan,
        )

    def _run(
        self,
        given: "_Operands",
        *,
        max_seqlens: tuple[int, int],
        causal: bool,
        window: int = 0,
        plan: Tensor | None = None,
    ) -> Tensor:
        """The arguments in the library's order; window as in varlen_attention."""
        left = window - 1 if window else -1
        found: list[Tensor] = self._forward(
            given.q,
            given.k,
            given.v,
            None,  # k_new
            None,  # v_new
            None,  # q_v
            None,  # out
            given.cu_seqlens_q,
            given.cu_seqlens_k,
            None,  # cu_seqlens_k_new
            None,  # seqused_q
            given.kv_seqlens,
            *max_seqlens,
            given.page_table,
            None,  # kv_batch_idx
            None,  # leftpad_k
            None,  # rotary_cos
            None,  # rotary_sin
            None,  # seqlens_rotary
            None,  # q_descale
            None,  # k_descale
            None,  # v_descale
            given.q.shape[-1] ** -0.5,
            causal,
            left,
            0 if causal and window else left,
            0.0,  # softcap
            True,  # is_rotary_interleaved
            plan,
            0,  # num_splits: chosen by the library
            None,  # pack_gqa: chosen by the library
            0,  # sm_margin
            None,  # s_aux
            1,  # cp_world_size
            0,  # cp_rank
            None,  # cp_tot_seqused_k
        )
        return found[0]


@dataclass(frozen=True, slots=True)
class _Operands:
    """Keys and values packed, with cu_seqlens_k, or in pages, with kv_seqlens and page_table."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None = None
    kv_seqlens: Tensor | None = None
    page_table: Tensor | None = None


def load(library: Path | None) -> FlashAttention3 | None:
    """None where no library was named."""
    return None if library is None else FlashAttention3(library)
