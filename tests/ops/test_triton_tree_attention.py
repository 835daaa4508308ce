"""Triton's attention of sequences that continue others: on the GPU, or interpreted without one."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from torch import Tensor
from tree_cases import TreeCase, assert_as_exact_as_torch, make_case, make_tree, trees

from bytetx.sequence_tree import SequenceTree

pytest.importorskip("triton")

from bytetx.ops import triton_kernels  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# numpy, which interprets them, warns of inf and NaN.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]
if DEVICE == "cuda":
    pytestmark.append(pytest.mark.gpu)
# The interpreter multiplies no bf16.
HALF_DTYPES = [torch.float16, torch.bfloat16] if DEVICE == "cuda" else [torch.float16]
DTYPES = [*HALF_DTYPES, torch.float32]
LENGTHS = st.sampled_from([0, 1, 2, 5, 20, 31, 33, 64, 65, 140])
FOREST = make_tree(
    [-1, 0, 1, 1, 1, 0, 5, 9, 7, -1], [70, 21, 20, 0, 1, 5, 3, 8, 9, 40], keys_alone=1
)


def attend(case: TreeCase, *, tile_rows: int | None = None, **options: object) -> Tensor:
    """The Triton kernel, into an output that held NaN."""
    head_dim = case.q.shape[2]
    if tile_rows is None:
        tile_rows = triton_kernels.tree_tile_rows(head_dim)
    found = case.tree.tiles(tile_rows, window=int(options.get("window", 0)))
    return triton_kernels.tree_attention(
        case.q,
        case.k,
        case.v,
        tuple(torch.from_numpy(table).to(DEVICE) for table in found),
        tile_rows=tile_rows,
        softmax_scale=head_dim**-0.5,
        **options,
        out=torch.full_like(case.q, torch.nan, memory_format=torch.contiguous_format),
    )


@settings(max_examples=12)
@given(
    tree=trees(LENGTHS, most=5),
    window=st.sampled_from([0, 0, 1, 30, 90]),
    softcap=st.sampled_from([0.0, 0.0, 3.0]),
    head_dim=st.sampled_from([16, 40, 128]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1 << 16),
)
def test_any_tree(
    tree: SequenceTree, window: int, softcap: float, head_dim: int, dtype: torch.dtype, seed: int
) -> None:
    assume(tree.num_rows > 0)
    torch.manual_seed(seed)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim}
    case = make_case(tree, dtype=dtype, device=DEVICE, **sizes)
    options = {"window": window, "softcap": softcap}
    assert_as_exact_as_torch(attend(case, **options), case, **options)


@pairwise(
    {
        "head_dim": [24, 80, 256],
        "dtype": DTYPES,
        "window": [0, 1, 50],
        "softcap": [0.0, 2.0],
        "tile_rows": [64, 192],  # a native plan's, too
    }
)
def test_head_sizes_windows_and_tiles(
    head_dim: int, dtype: torch.dtype, window: int, softcap: float, tile_rows: int
) -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": head_dim}
    case = make_case(FOREST, dtype=dtype, device=DEVICE, **sizes)
    options = {"window": window, "softcap": softcap}
    assert_as_exact_as_torch(attend(case, tile_rows=tile_rows, **options), case, **options)


@pairwise({"sequence": [0, 2, 9], "window": [0, 12], "broken": [torch.nan, torch.inf]})
def test_broken_keys_reach_the_sequences_that_continue_theirs_alone(
    sequence: int, broken: float, window: int
) -> None:
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16}
    tree = make_tree(
        [-1, 0, 1, 1, 0, -1, 9, 6, 7, -1], [7, 9, 2, 1, 0, 8, 3, 5, 2, 20], keys_alone=1
    )
    case = make_case(tree, dtype=torch.float16, device=DEVICE, **sizes)
    right = case.attend(torch.float64, window=window)
    poisoned, sees = case.poisoned(sequence, broken)
    ours = attend(poisoned, window=window)
    assert (ours[~sees] - right[~sees]).abs().max() <= 2e-3 * right.abs().max()
    if not window:
        assert ours[sees].isnan().all()


def test_keys_before_a_window_are_not_seen() -> None:
    tree = make_tree([-1, 0, 1, 1], [20, 20, 10, 7])
    case = make_case(tree, dtype=torch.float16, device=DEVICE, num_heads=1, num_kv_heads=1)
    right = case.attend(torch.float64, window=15)
    poisoned, _ = case.poisoned(0, torch.nan)
    ours = attend(poisoned, window=15)
    assert ours[20:34].isnan().all()
    assert (ours[34:] - right[34:]).abs().max() <= 2e-3 * right.abs().max()
