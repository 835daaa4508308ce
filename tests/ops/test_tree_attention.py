"""Attention of sequences that continue others, on the CPU: against float64 and against the bits of
the same sequences unshared.

Uninitialised memory is NaN in every test here.
"""

from dataclasses import replace

import cpu_kernels
import pytest
import torch
from cpu_kernels import DTYPES
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from torch import Tensor
from tree_cases import TreeCase, assert_as_exact_as_torch, make_case, make_tree, trees

from bytetx.ops import attention, native
from bytetx.ops.attention_plan import plan_attention
from bytetx.sequence_tree import SequenceTree

poisoned_memory, isa, dtype = cpu_kernels.poisoned_memory, cpu_kernels.isa, cpu_kernels.dtype
HEAD_DIMS = (*range(8, 129, 8), 160, 192, 256, 1, 5, 20, 33, 260)
# Around tiles of 32 and 64 rows, and around the block of 256 keys and the group of 256 rows.
LENGTHS = st.sampled_from([0, 1, 2, 5, 16, 31, 32, 33, 40, 64, 65, 90]) | st.integers(250, 260)
# Instruction, two states, questions of both, one of the instruction, and a root of its own; the
# keys of the last two are a cache's.
FOREST = make_tree(
    [-1, 0, 1, 1, 1, 0, 5, 5, 0, -1, 11, -1],
    [70, 255, 33, 0, 1, 190, 40, 300, 2, 17, 9, 31],
    keys_alone=1,
)


def run(case: TreeCase, isa: str, *, is_shared: bool = True, **options: object) -> Tensor:
    """The CPU's kernel of one instruction set."""
    whole, places = (case, slice(None)) if is_shared else case.unshared()
    plan = case.plan(window=options.get("window", 0)) if is_shared else None
    settings = {"window": 0, "softcap": 0.0} | options
    out = attention.run_kernel(
        whole.q,
        whole.k,
        whole.v,
        whole.cu_seqlens,
        max_seqlen=whole.max_seqlen,
        softmax_scale=whole.q.shape[2] ** -0.5,
        causal=True,
        **settings,
        relative_bias=None,
        bias_positions=None,
        plan=plan,
        isa=isa,
    )
    return out[places]


OPTIONS = st.fixed_dictionaries(
    {
        "window": st.sampled_from([0, 0, 1, 2, 17, 64, 100, 300, 1 << 40]),
        "softcap": st.sampled_from([0.0, 0.0, 3.0]),
    }
)
HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)])


@pytest.mark.feature("Arithmetic", "shared prefixes in one pass")
@settings(max_examples=60)
@given(
    tree=trees(LENGTHS),
    options=OPTIONS,
    heads=HEADS,
    head_dim=st.sampled_from(HEAD_DIMS),
    dtype=st.sampled_from(list(DTYPES.values())),
    isa=st.sampled_from(native.available_isas()),
    seed=st.integers(0, 1 << 16),
)
def test_any_tree_has_the_bits_of_its_unshared_sequences(
    tree: SequenceTree,
    options: dict[str, object],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    isa: str,
    seed: int,
) -> None:
    assume(tree.num_rows > 0)
    torch.manual_seed(seed)
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    case = make_case(tree, dtype=dtype, **sizes)
    ours = run(case, isa, **options)
    assert_as_exact_as_torch(ours, case, **options)
    assert torch.equal(ours, run(case, isa, is_shared=False, **options))


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_head_sizes(head_dim: int, dtype: torch.dtype, isa: str) -> None:
    case = make_case(FOREST, dtype=dtype, head_dim=head_dim, num_heads=2, num_kv_heads=1)
    ours = run(case, isa)
    assert_as_exact_as_torch(ours, case)
    assert torch.equal(ours, run(case, isa, is_shared=False))


@pairwise(
    {
        "window": [0, 1, 31, 256, 301, 1 << 40],
        "softcap": [0.0, 1.5],
        "heads": [(1, 1), (4, 2), (3, 1)],
    }
)
def test_windows_caps_and_groups(
    window: int, softcap: float, heads: tuple[int, int], dtype: torch.dtype, isa: str
) -> None:
    options = {"window": window, "softcap": softcap}
    case = make_case(FOREST, dtype=dtype, num_heads=heads[0], num_kv_heads=heads[1], head_dim=24)
    ours = run(case, isa, **options)
    assert_as_exact_as_torch(ours, case, **options)
    assert torch.equal(ours, run(case, isa, is_shared=False, **options))


def test_rows_of_k_at_odd_places(dtype: torch.dtype, isa: str) -> None:
    wide = torch.full((FOREST.total_keys, 4 * 24 + 7), torch.nan, dtype=dtype)
    packed = wide[:, 7:].unflatten(1, (4, 24))
    packed.copy_(torch.randn(packed.shape))
    q, k, v = packed.split([2, 1, 1], dim=1)
    case = TreeCase(FOREST, q[: FOREST.num_rows], k, v)
    assert torch.equal(run(case, isa), run(case, isa, is_shared=False))


@pytest.mark.parametrize("num_threads", [2, 7])
def test_threads_change_no_bit(num_threads: int, dtype: torch.dtype, isa: str) -> None:
    tree = make_tree([-1, *[0] * 30, -1, *[31] * 9], [600, *[40] * 30, 300, *[1] * 9])
    case = make_case(tree, dtype=dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = run(case, isa)
        torch.set_num_threads(num_threads)
        for _ in range(3):
            assert torch.equal(run(case, isa), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
@pytest.mark.parametrize("sequence", range(len(FOREST)))
def test_broken_keys_reach_the_sequences_that_continue_theirs_alone(
    sequence: int, broken: float, dtype: torch.dtype, isa: str
) -> None:
    case = make_case(FOREST, dtype=dtype, head_dim=16, num_heads=2, num_kv_heads=1)
    clean = run(case, isa)
    poisoned, sees = case.poisoned(sequence, broken)
    ours = run(poisoned, isa)
    assert torch.equal(ours[~sees], clean[~sees])
    if FOREST.seqlens[sequence]:
        assert ours[sees].isnan().all()


def test_keys_before_a_window_are_not_seen(dtype: torch.dtype, isa: str) -> None:
    tree = make_tree([-1, 0, 1, 1], [100, 50, 40, 7])
    case = make_case(tree, dtype=dtype, head_dim=32)
    clean = run(case, isa, window=48)
    poisoned, _ = case.poisoned(0, torch.nan)
    ours = run(poisoned, isa, window=48)
    assert ours[100:147].isnan().all()  # the state's other rows are in tiles with these
    assert torch.equal(ours[150:], clean[150:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("window", [0, 60])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_the_operation_takes_a_plan_with_a_tree(
    dtype: torch.dtype, window: int, softcap: float
) -> None:
    """In f16, which the CPU's kernel does not take, torch attends sequence by sequence."""
    case = make_case(FOREST, dtype=dtype)
    options = {"window": window, "softcap": softcap}
    assert_as_exact_as_torch(case.run(**options), case, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": False}, "must be causal and without a relative_bias"),
        ({"has_bias": True}, "must be causal and without a relative_bias"),
        ({"tree": make_tree([-1, 0], [3, 4])}, "must be of this batch of 3 sequences and 9 tokens"),
        ({"tree": make_tree([-1, 0, 0], [3, 4, 3])}, "9 tokens, got 3 and 10"),
        ({"tree": make_tree([-1, 0, 0], [3, 4, 2], keys_alone=1)}, "9 tokens, got 3 and 7"),
    ],
)
def test_plans_that_cannot_be_are_refused(options: dict[str, object], message: str) -> None:
    tree = make_tree([-1, 0, 0], [3, 4, 2])
    sizes = {"total_tokens": 9, "head_dim": 16}
    with pytest.raises(ValueError, match=message):
        plan_attention(
            make_case(tree).cu_seqlens, **sizes, **{"causal": True, "tree": tree} | options
        )


def test_calls_unlike_their_plan_are_refused() -> None:
    case = make_case(make_tree([-1, 0, 0], [3, 4, 2], keys_alone=1), head_dim=16)
    plan = case.plan()

    def call(case: TreeCase, **options: object) -> None:
        operands = (case.q, case.k, case.v, case.cu_seqlens)
        given = {"max_seqlen": 9, "causal": True, "plan": plan} | options
        attention.varlen_attention(*operands, **given)

    call(case)
    for changes in ({"causal": False}, {"window": 3}):
        with pytest.raises(ValueError, match="plan must be of this batch"):
            call(case, **changes)
    with pytest.raises(ValueError, match="plan must be of this batch"):
        call(make_case(make_tree([-1, 0], [7, 2], keys_alone=1), head_dim=16))
    with pytest.raises(ValueError, match=r"k must have shape \[9, any, 16\], got float32 \[12"):
        call(make_case(make_tree([-1, 0, 0], [3, 4, 5], keys_alone=1), head_dim=16))


@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        (0, {4: 9}, "key_rows must be rows of k, below num_keys, got 9"),
        (0, {0: -1}, "key_rows must be rows of k, below num_keys, got -1"),
        (1, {0: 1}, "cu_keys must start at 0, got 1"),
        (1, {1: 2}, "its own tokens at least, a length, got 2"),
    ],
)
def test_tables_that_reach_elsewhere_are_refused(
    table: int, values: dict[int, int], message: str
) -> None:
    case = make_case(make_tree([-1, 0, 0], [3, 4, 2], keys_alone=1), head_dim=16)
    plan = case.plan()
    tables = [t.clone() for t in plan.tables]
    for place, value in values.items():
        tables[table][place] = value
    bad = replace(plan, tables=tuple(tables))
    with pytest.raises(ValueError, match=message):
        attention.varlen_attention(
            case.q, case.k, case.v, case.cu_seqlens, max_seqlen=9, causal=True, plan=bad
        )
