"""Attention of sequences that continue others on a GPU, by plans: the Hopper kernels, Triton's for
what they do not take. Against float64, and against the bits of the same sequences unshared."""

import numpy as np
import pytest
import torch
from pairwise import pairwise
from tree_cases import TreeCase, assert_as_exact_as_torch, make_case, make_tree

from bytetx.ops import native
from bytetx.ops.attention import varlen_attention
from bytetx.sequence_tree import MAX_ANCESTORS, SequenceTree

pytestmark = pytest.mark.gpu

DTYPES = [torch.float16, torch.bfloat16]
HEAD_DIMS = [64, 80, 96, 128, 256]
EDGES = [0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 191, 192, 193]


def random_tree(
    seed: int, *, size: int, mean: float, keys_alone: int = 0, step: int = 1
) -> SequenceTree:
    """Lengths at and between the edges of tiles; step: those with children are multiples of it."""
    rng = np.random.default_rng(seed)
    parents, depths = [-1], [0]
    for i in range(1, size):
        # A root, one more child of the last one's parent, a child of the last one, or of any.
        parent = int(rng.choice([-1, parents[-1], parents[-1], i - 1, rng.integers(i)]))
        if parent >= 0 and depths[parent] == MAX_ANCESTORS:
            parent = -1
        parents.append(parent)
        depths.append(0 if parent < 0 else depths[parent] + 1)
    lens = np.where(rng.random(size) < 0.4, rng.choice(EDGES, size), rng.exponential(mean, size))
    lens = lens.astype(int)
    has_children = np.isin(np.arange(size), parents)
    lens = np.where(has_children, lens // step * step, lens)
    if not keys_alone:
        return make_tree(parents, lens.tolist())
    # Sequences that are keys alone: some roots, to the end.
    alone = rng.permutation(np.flatnonzero(np.array(parents) < 0))[:keys_alone]
    order = [*np.setdiff1d(np.arange(size), alone), *alone]
    place = {int(old): new for new, old in enumerate(order)} | {-1: -1}
    return make_tree(
        [place[parents[i]] for i in order],
        [int(lens[i]) for i in order],
        keys_alone=len(alone),
    )


TREES = {
    "states and questions": make_tree(
        np.concatenate([[-1] + [21 * i] * 20 for i in range(8)]).tolist(), ([600] + [40] * 20) * 8
    ),
    "one": make_tree([-1, 0], [300, 1]),
    "few": make_tree([-1, 0, 0, 2], [129, 20, 65, 7]),
    "of a cache": make_tree([3, 3, 4, 4, -1], [20, 100, 1, 300, 77], keys_alone=2),
    "nothing continues": make_tree([-1] * 5, [64, 1, 0, 300, 65]),
    "long": make_tree([-1, 0, 1, 1, 0], [2000, 700, 300, 1, 512]),
    "many": random_tree(1, size=300, mean=80),
    "many of a cache": random_tree(2, size=200, mean=60, keys_alone=9),
    "deep": random_tree(3, size=60, mean=300),
}


@pytest.fixture(autouse=True)
def planned() -> None:
    reason = native.why_no_kernel("planned_attention", torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)


def case_of(tree: SequenceTree, **sizes: object) -> TreeCase:
    return make_case(tree, device="cuda", **{"dtype": torch.float16, "num_heads": 4} | sizes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_every_tree_is_as_exact_as_torch(
    tree: SequenceTree, head_dim: int, dtype: torch.dtype
) -> None:
    case = case_of(tree, head_dim=head_dim, dtype=dtype)
    assert_as_exact_as_torch(case.run(), case)


@pairwise(
    {
        "tree": [pytest.param(tree, id=name) for name, tree in TREES.items()],
        "head_dim": HEAD_DIMS,
        "dtype": DTYPES,
        "window": [1, 2, 63, 64, 100, 700, 1 << 40],
        "batch_invariant": [False, True],
    }
)
def test_windows(
    tree: SequenceTree, head_dim: int, dtype: torch.dtype, window: int, batch_invariant: bool
) -> None:
    case = case_of(tree, head_dim=head_dim, dtype=dtype)
    ours = case.run(window=window, batch_invariant=batch_invariant)
    assert_as_exact_as_torch(ours, case, window=window)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 2), (6, 1)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ["states and questions", "few", "deep"])
def test_query_heads_share_key_heads(name: str, head_dim: int, heads: tuple[int, int]) -> None:
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": head_dim}
    case = case_of(TREES[name], **sizes)
    assert_as_exact_as_torch(case.run(), case)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("seed", range(12))
def test_random_trees(seed: int, head_dim: int) -> None:
    sizes = {"size": (1, 5, 40, 250)[seed % 4], "mean": (9, 70, 250)[seed % 3]}
    tree = random_tree(100 + seed, **sizes, keys_alone=seed % 2 * 3)
    if tree.num_rows == 0:
        pytest.skip("every sequence is keys alone")
    case = case_of(tree, head_dim=head_dim, dtype=DTYPES[seed % 2])
    options = {"window": (0, 0, 50)[seed % 3], "batch_invariant": seed % 5 == 0}
    assert_as_exact_as_torch(case.run(**options), case, window=options["window"])


@pytest.mark.parametrize("softcap", [2.0, 50.0])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("name", ["few", "of a cache", "many"])
def test_what_the_planned_kernels_do_not_take(
    name: str, dtype: torch.dtype, softcap: float
) -> None:
    case = case_of(TREES[name], dtype=dtype)
    for options in ({"softcap": softcap}, {"softcap": softcap, "window": 90}):
        assert_as_exact_as_torch(case.run(**options), case, **options)
    if dtype == torch.float32:
        assert_as_exact_as_torch(case.run(), case)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_batch_invariant_plans_give_the_bits_of_unshared_sequences(
    seed: int, dtype: torch.dtype, head_dim: int
) -> None:
    """Where ancestors end with a step of keys. In a window steps begin with a tile's first key:
    such models share nothing then (Layers.prefix_multiple)."""
    sizes = {"size": (14, 30, 100, 60)[seed], "mean": (300, 100, 60, 200)[seed]}
    tree = random_tree(200 + seed, **sizes, keys_alone=seed % 2 * 2, step=64)
    case = case_of(tree, head_dim=head_dim, dtype=dtype)
    options = {"batch_invariant": True}
    assert torch.equal(case.run(**options), case.run_unshared(**options))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_batch_invariant_plans_do_not_depend_on_mates(head_dim: int) -> None:
    lens = [192, 40, 70, 1, 128, 33, 5]
    together = case_of(make_tree([-1, 0, 0, 1, -1, 4, -1], lens), head_dim=head_dim)
    ours = together.run(batch_invariant=True)
    first = slice(0, 192 + 40 + 70 + 1)
    alone = TreeCase(
        make_tree([-1, 0, 0, 1], lens[:4]),
        *(t[first] for t in (together.q, together.k, together.v)),
    )
    assert torch.equal(alone.run(batch_invariant=True), ours[first])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("name", ["few", "of a cache", "long", "deep"])
def test_broken_keys_reach_the_sequences_that_continue_theirs_alone(
    name: str, window: int, batch_invariant: bool, head_dim: int, broken: float
) -> None:
    case = case_of(TREES[name], head_dim=head_dim)
    right = case.attend(torch.float64, window=window)
    for sequence in range(0, len(case.tree), max(1, len(case.tree) // 6)):
        poisoned, sees = case.poisoned(sequence, broken)
        ours = poisoned.run(window=window, batch_invariant=batch_invariant).double()
        error = (ours - right)[~sees]
        assert len(error) == 0 or error.abs().max() < 5e-3  # as in the random lists
        if case.tree.seqlens[sequence] and not window:
            assert ours[sees].isnan().all()


@pytest.mark.parametrize("head_dim", [64, 128])
def test_broken_rows_beside_the_batch_are_not_read(head_dim: int) -> None:
    """k and v in a buffer with NaN around them, and q in one with fewer rows."""
    tree = TREES["of a cache"]
    wide = torch.full((tree.total_keys + 128, 2, 4, head_dim), torch.nan, device="cuda").half()
    k, v = wide[64:-64].unbind(1)
    k.normal_(), v.normal_()
    q = torch.randn(tree.num_rows, 4, head_dim, device="cuda").half()
    case = TreeCase(tree, q, k, v)
    assert_as_exact_as_torch(case.run(), case)


@pytest.mark.parametrize("size", [3.0, 10.0, 60.0])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_a_score_far_above_the_earlier_ones(size: float, head_dim: int) -> None:
    """Among the keys of ancestors, and among a tile's own behind them."""
    case = case_of(TREES["long"], head_dim=head_dim)
    for rank, row in enumerate([700, 1999, 2600, 2990], 1):
        case.k[row] *= rank * size
    assert_as_exact_as_torch(case.run(), case)


def test_one_plan_serves_many_layers() -> None:
    """The native kernels count in it, and leave it as they found it."""
    case = case_of(TREES["states and questions"])
    plan = case.plan()
    operands = (case.q, case.k, case.v, case.cu_seqlens)
    first, *others = (
        varlen_attention(*operands, max_seqlen=case.max_seqlen, causal=True, plan=plan)
        for _ in range(4)
    )
    assert all(torch.equal(other, first) for other in others)
