"""FlashAttention-3 as a rival, from the library that vLLM's wheel carries for Hopper GPUs."""

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
        lengths = (max_seqlen, max_seqlen)
        packed = (cu_seqlens, cu_seqlens)
        return self._run((q, k, v), packed, lengths, causal=causal, window=window)

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
            *(len(kv_seqlens), max_seqlen, max_kv_seqlen),
            *(num_heads, num_kv_heads, head_dim, head_dim),  # of v the last
            *(dtype, kv_seqlens, cu_seqlens),
            *(None, None, None, None),  # cu_seqlens_k, cu_seqlens_k_new, seqused_q, leftpad_k
            *(page_size, 0),  # max_seqlen_k_new
            *(True, -1, -1, False),  # causal, window_size_left and _right, has_softcap
            *(0, None, 0),  # num_splits and pack_gqa, chosen by the library; sm_margin
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
        lengths, pages = (max_seqlen, max_kv_seqlen), (kv_seqlens, page_table, plan)
        return self._run((q, k_cache, v_cache), (cu_seqlens, None), lengths, *pages, causal=True)

    def _run(
        self,
        qkv: tuple[Tensor, Tensor, Tensor],
        cu_seqlens: tuple[Tensor, Tensor | None],
        max_seqlens: tuple[int, int],
        kv_seqlens: Tensor | None = None,
        page_table: Tensor | None = None,
        plan: Tensor | None = None,
        *,
        causal: bool,
        window: int = 0,
    ) -> Tensor:
        """The arguments in the library's order; window as in varlen_attention.

        Keys and values are packed, with their cu_seqlens, or in pages, with the rest.
        """
        left = window - 1 if window else -1
        right = 0 if causal and window else left
        found: list[Tensor] = self._forward(
            *(*qkv, None, None, None, None),  # k_new, v_new, q_v, out
            *(*cu_seqlens, None, None, kv_seqlens),  # cu_seqlens_k_new, seqused_q
            *(*max_seqlens, page_table),
            *(None, None),  # kv_batch_idx, leftpad_k
            *(None, None, None),  # rotary_cos, rotary_sin, seqlens_rotary
            *(None, None, None),  # q_descale, k_descale, v_descale
            *(qkv[0].shape[-1] ** -0.5, causal, left, right),
            *(0.0, True, plan),  # softcap, is_rotary_interleaved
            *(0, None, 0),  # num_splits and pack_gqa, chosen by the library; sm_margin
            *(None, 1, 0, None),  # s_aux, cp_world_size, cp_rank, cp_tot_seqused_k
        )
        return found[0]


def load(library: Path | None) -> FlashAttention3 | None:
    """None where no library was named."""
    return None if library is None else FlashAttention3(library)
