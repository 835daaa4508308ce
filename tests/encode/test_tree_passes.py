"""Batches with common prefixes, padded to buckets: the blocks, and on a GPU their graphs."""

from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoints import save_causal
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import one_thread  # noqa: F401  (autouse)
from tree_cases import trees

import bytetx
from bytetx.buckets import bucket_of
from bytetx.encode.tree_passes import _layout
from bytetx.model import Model
from bytetx.ops.attention_plan import tree_tables
from bytetx.packed import PackedBatch, prefix_sums
from bytetx.sequence_tree import SequenceTree

TILE_ROWS, WINDOWS = 64, (0, 48)


def make_batch(tree: SequenceTree, ids: np.ndarray) -> PackedBatch:
    return PackedBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(tree.positions()),
        token_type_ids=None,
        cu_seqlens=torch.from_numpy(prefix_sums(tree.seqlens)),
        seqlens=torch.from_numpy(tree.seqlens),
        max_seqlen=int((tree.prefix_lens + tree.seqlens).max()),
        tree=tree,
    )


@settings(max_examples=60, deadline=None)
@given(tree=trees(st.sampled_from([0, 1, 2, 31, 64, 65, 200])), invariant=st.booleans())
def test_a_block_holds_the_batch_and_its_plan(tree: SequenceTree, invariant: bool) -> None:
    tree = SequenceTree(tree.parents, tree.seqlens)
    ids = np.random.default_rng(0).integers(1, 99, tree.num_rows, dtype=np.int32)
    bucket = bucket_of(tree.num_rows, len(tree), max_tokens=1 << 20)
    assert bucket is not None
    layout = _layout(bucket, tile_rows=TILE_ROWS, windows=WINDOWS)
    padded = layout.padded(tree)
    assert (len(padded), padded.num_rows) == (bucket.batch_size, bucket.total_tokens)
    tables = {
        window: tree_tables(
            padded,
            TILE_ROWS,
            window=window,
            batch_invariant=invariant,
            num_tiles=layout.num_tiles,
        )
        for window in WINDOWS
    }
    block = np.full(layout.num_ints, -77, dtype=np.int32)
    layout.write(block, make_batch(tree, ids), tables)
    read = layout.read(torch.from_numpy(block), padded, max_seqlen=7)
    count = tree.num_rows
    assert read.input_ids[:count].tolist() == ids.tolist()
    assert read.position_ids[:count].tolist() == tree.positions().tolist()
    assert not read.input_ids[count:].any() and not read.position_ids[count:].any()
    assert read.cu_seqlens.tolist() == padded.starts.tolist()
    assert read.tree is padded and read.tree_tables is not None
    for window in WINDOWS:
        assert (read.tree_tables[window].numpy() == tables[window]).all()
        # The tree's own rows are in tiles of their own, which see what they see without fillers.
        found = padded.tiles(TILE_ROWS, window=window, batch_invariant=invariant)
        alone = tree.tiles(TILE_ROWS, window=window, batch_invariant=invariant)
        own = found.tiles[:, 0] < count
        kept = np.concatenate([found.tiles, found.ancestors.reshape(-1, 8)], axis=1)[own]
        wanted = np.concatenate([alone.tiles, alone.ancestors.reshape(-1, 8)], axis=1)
        used = tables[window][0]
        assert used == len(found.tiles) <= layout.num_tiles
        if invariant or len(tree.parents) == 0 or tree.parents[-1] >= 0:
            assert sorted(kept.tolist()) == sorted(wanted.tolist())


def texts_with_prefixes(rng: np.random.Generator, *, groups: int, most: int) -> list[list[int]]:
    texts = []
    for _ in range(groups):
        start = rng.integers(5, 90, rng.integers(40, 120)).tolist()
        for _ in range(int(rng.integers(2, most))):
            texts.append(start + rng.integers(5, 90, rng.integers(1, 30)).tolist())
    return texts


def load(folder: Path, *, cuda_graphs: bool = True, **options: object) -> Model:
    """A small model whose steps share prefixes, however little that saves."""
    model = bytetx.load(
        folder,
        device="cuda",
        token_budget=4096,
        prefix_cache_bytes=0,
        cuda_graphs=cuda_graphs,
        **options,
    )
    model.encoder.runner._least_saved = 1
    return model


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "float16", "batch_invariant": True}),
        ("qwen3-window", {"dtype": "bfloat16"}),
        ("gemma3", {"dtype": "bfloat16"}),
    ],
)
def test_a_graph_serves_every_tree_of_its_sizes(
    tmp_path: Path, family: str, options: dict[str, object]
) -> None:
    """The bits of a pass without graphs, whatever tree was captured."""
    sizes = {"hidden_size": 128, "head_dim": 64, "max_position_embeddings": 256}
    folder = save_causal(tmp_path, family, **sizes)
    model, eager = load(folder, **options), load(folder, cuda_graphs=False, **options)
    rng = np.random.default_rng(3)
    for _ in range(40):
        texts = texts_with_prefixes(rng, groups=int(rng.integers(1, 4)), most=6)
        ours, wanted = model.score(texts), eager.score(texts)
        for own, other in zip(ours, wanted, strict=True):
            assert np.array_equal(own.token_log_likelihoods, other.token_log_likelihoods)
        vectors = model.embed(texts, pooling="lasttoken")
        assert np.array_equal(vectors, eager.embed(texts, pooling="lasttoken"))
    queue = model.encoder.runner._queue
    assert queue is not None and queue.num_graphs > 3
    counts, _ = model.encoder.counts()
    assert counts.computed_tokens < 0.7 * counts.total_tokens


@pytest.mark.gpu
def test_shared_passes_are_as_exact_as_unshared_ones(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "head_dim": 64, "max_position_embeddings": 256}
    folder = save_causal(tmp_path, **sizes)
    exact = bytetx.load(folder, device="cpu", dtype="float32")
    model = load(folder, dtype="bfloat16")
    alone = load(folder, dtype="bfloat16")
    alone.encoder.runner.prefix_multiple = 0
    rng = np.random.default_rng(4)
    for _ in range(12):
        texts = texts_with_prefixes(rng, groups=2, most=5)
        errors = [
            max(
                float(np.abs(own.token_log_likelihoods - true.token_log_likelihoods).max())
                for own, true in zip(found.score(texts), exact.score(texts), strict=True)
            )
            for found in (model, alone)
        ]
        assert errors[0] < 2 * errors[1] + 0.02


@pytest.mark.gpu
def test_graphs_are_given_up_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_causal(tmp_path, max_position_embeddings=256)
    model = load(folder, dtype="bfloat16")
    texts = texts_with_prefixes(np.random.default_rng(5), groups=2, most=5)
    wanted = [one.token_log_likelihoods for one in model.score(texts)]
    for _ in range(2):
        model.score(texts)
    queue = model.encoder.runner._queue
    assert queue is not None and queue.num_graphs == 1
    assert model.encoder.runner._release_memory() and queue.num_graphs == 0
    for _ in range(4):
        found = [one.token_log_likelihoods for one in model.score(texts)]
        assert all(map(np.array_equal, found, wanted))
    assert queue.num_graphs == 1
