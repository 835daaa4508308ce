"""E4M3 rows with one scale each, as FP8 GEMMs take them: checks, choice of kernel."""

import torch
from torch import Tensor

from bytetx.ops import native, reference
from bytetx.ops.check import require_contiguous, require_tensor
from bytetx.ops.registry import Operation

ROW_MULTIPLE = 16  # elements: what a row of an FP8 GEMM's operand must be a multiple of
# A row lives in the registers of one CTA, of quantize_rows a larger one.
MAX_NORM_BYTES = 32768
MAX_ROW_BYTES = 65536

# Shape class: dtype and width.  run(x) as of quantize_rows.
QUANTIZE_ROWS = Operation("quantize_rows", "cuda")


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """(rows, scale): x is about rows * scale[:, None], rows in E4M3.

    x: [total_tokens, hidden_size], f32, bf16 or f16, contiguous.
    scale = amax / 448 and rows = e4m3(x * (448 / amax)), to nearest even, with amax the largest
    magnitude of a row, at least 2^-100.
    Returns float8_e4m3fn [total_tokens, hidden_size] and f32 [total_tokens].
    Raises ValueError on shape, dtype or device mismatch.
    """
    require_tensor("x", x, shape=(None, None))
    require_contiguous("x", x)
    quantized: tuple[Tensor, Tensor] = QUANTIZE_ROWS.choose(x.device, x.dtype, x.shape[1]).run(x)
    return quantized


def has_fp8_kernel(x: Tensor) -> bool:
    """Whether a GPU's row kernels write E4M3 copies of rows as wide as x's."""
    return x.is_cuda and _fits(x.shape[1], x.dtype, MAX_NORM_BYTES)


def _fits(width: int, dtype: torch.dtype, most_bytes: int) -> bool:
    return width % ROW_MULTIPLE == 0 and 0 < width * dtype.itemsize <= most_bytes


def _takes_rows(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    return _fits(width, dtype, MAX_ROW_BYTES)


@QUANTIZE_ROWS.native_kernel("cuda", takes=_takes_rows)
def _run_kernel(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, scale = empty_fp8_rows(x)
    native.require_kernel("quantize_rows", x.device)(
        x=x,
        out_fp8=rows,
        out_scale=scale,
        total_tokens=x.shape[0],
        hidden_size=x.shape[1],
        dtype=native.DTYPE_CODES[x.dtype],
        launch=native.launch_args(x.device),
    )
    return rows, scale


@QUANTIZE_ROWS.in_torch()
def _run_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    return reference.quantize_rows(x)


def empty_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Uninitialised rows and scales for an E4M3 copy of x."""
    rows = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    return rows, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
