"""Each rank's share: heads, features, words, rows."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import FAMILIES, SIZES

from bytetx.checkpoint.spec import ModelSpec, build_spec
from bytetx.errors import InputError
from bytetx.parallel.layout import feature_offsets, has_even_shards, shard_model, shard_offsets
from bytetx.parallel.row_scheme import RowScheme, row_scheme

SMALL, LARGE = range(1, 9), range(0, 70_000)


def llama(num_heads: int, num_kv_heads: int) -> ModelSpec:
    config = {"model_type": "llama", "hidden_size": 64 * num_heads, "head_dim": 64}
    config |= {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    config |= {"num_hidden_layers": 2, "intermediate_size": 352, "vocab_size": 32_000}
    return build_spec(config | {"max_position_embeddings": 128, "rms_norm_eps": 1e-5})


def joined(ranges: list[range]) -> list[int]:
    return [i for shard in ranges for i in shard]


@given(st.sampled_from(LARGE), st.sampled_from(SMALL), st.sampled_from([1, 16, 64, 128]))
def test_shares_are_whole_steps_and_differ_by_one(count: int, size: int, step: int) -> None:
    offsets = shard_offsets(count, size, step=step)
    assert len(offsets) == size + 1 and offsets[0] == 0 and offsets[-1] == count
    shares = [end - start for start, end in pairwise(offsets)]
    tiles = [-(-share // step) for share in shares]
    assert max(tiles) - min(tiles) <= 1
    ragged = [share for share in shares if share % step]
    assert len(ragged) <= 1
    if ragged:  # the last one that has any rows
        assert [share for share in shares if share][-1] == ragged[0]


@given(st.integers(8, 300_000), st.sampled_from(SMALL))
def test_features_are_dealt_evenly_where_they_can_be(count: int, size: int) -> None:
    shares = [end - start for start, end in pairwise(feature_offsets(count, size))]
    assert sum(shares) == count and min(shares) > 0
    if count % size == 0:
        assert set(shares) == {count // size}
    elif count >= 64 * size:
        assert all(share % 64 == 0 for share in shares[:-1])


@pytest.mark.parametrize("size", SMALL)
@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (32, 4), (12, 12), (14, 2), (8, 1)])
def test_every_head_is_somewhere_with_its_keys(heads: tuple[int, int], size: int) -> None:
    num_heads, num_kv_heads = heads
    spec, group = llama(*heads), num_heads // num_kv_heads
    try:
        splits = [shard_model(spec, rank=rank, size=size) for rank in range(size)]
    except InputError:
        assert size > num_kv_heads and (size % num_kv_heads or size // num_kv_heads > group)
        return
    assert joined([split.heads for split in splits]) == list(range(num_heads))
    for split in splits:
        assert {head // group for head in split.heads} == set(split.kv_heads)
        assert len(split.heads) % len(split.kv_heads) == 0
    if size <= num_kv_heads:
        assert joined([split.kv_heads for split in splits]) == list(range(num_kv_heads))
    # The cache of rank 0 is what the others' sizes are asked from.
    assert max(len(split.kv_heads) for split in splits) == len(splits[0].kv_heads)
    assert joined([split.vocab for split in splits]) == list(range(spec.vocab_size))
    assert joined([split.inner for split in splits]) == list(range(spec.intermediate_size))


def test_too_many_ranks_for_the_heads() -> None:
    with pytest.raises(InputError, match="tp must be one of 1 ... 8 for a model of 8 attention"):
        shard_model(llama(8, 8), rank=0, size=9)
    with pytest.raises(InputError, match=r"one of 1, 2, 4, 6, 8, 10, 12, 14 .* with 2 .*, got 3"):
        shard_model(llama(14, 2), rank=0, size=3)


@pytest.mark.parametrize("family", FAMILIES)
def test_encoders_split(family: str) -> None:
    config = SIZES | {"model_type": family, "num_attention_heads": 4, "embedding_size": 32}
    config |= {"dim": 48, "n_layers": 2, "n_heads": 4, "hidden_dim": 80, "pad_token_id": 1}
    spec = build_spec(config | {"layer_norm_eps": 1e-12})
    splits = [shard_model(spec, rank=rank, size=4) for rank in range(4)]
    assert joined([split.heads for split in splits]) == list(range(4))


def test_small_m_are_everywhere_and_many_are_dealt() -> None:
    scheme = RowScheme(100, ((1000, 128), (0, 16)))
    assert scheme.offsets(0, 2) is None
    assert scheme.offsets(99, 2) is None
    assert scheme.offsets(100, 4) == (0, 32, 64, 96, 100)
    assert scheme.offsets(1000, 8) == (0, 128, 256, 384, 512, 640, 768, 896, 1000)
    assert scheme.offsets(1001, 2) == (0, 512, 1001)
    assert RowScheme(1, ((0, 16),)).offsets(17, 4) == (0, 16, 17, 17, 17)


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_the_table_of_a_device(device_type: str) -> None:
    scheme = row_scheme(device_type, 2)
    firsts = [first for first, _ in scheme.tiles]
    assert firsts == sorted(firsts, reverse=True) and firsts[-1] == 0
    assert all(rows % 16 == 0 for _, rows in scheme.tiles)


def test_a_group_without_a_table_takes_the_next_larger_ones() -> None:
    assert row_scheme("cpu", 1) == row_scheme("cpu", 2) == row_scheme("cpu", 64)


def test_a_model_takes_the_table_of_the_nearest_one() -> None:
    short, long = (row_scheme("cuda", 2, hidden_size) for hidden_size in (768, 100_000))
    assert row_scheme("cuda", 2) == long and short.shard_from_tokens > long.shard_from_tokens


def test_shares_are_even_or_not() -> None:
    spec = build_spec({"model_type": "gpt2", "n_embd": 192, "n_head": 3})
    assert has_even_shards(spec, 3) and not has_even_shards(spec, 2)
